// Reads numbers and bytes from a fuzzer's input; zeros after its end. Buffers have exactly the
// requested length, so that AddressSanitizer detects accesses beyond it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

// Runs the target on an input; returns 0.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#define FUZZ_CHECK(condition)                                                     \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: %s failed\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                               \
    }                                                                             \
  } while (0)

class Input {
 public:
  Input(const uint8_t* data, size_t size) : rest_(data, size) {}
  bool empty() const { return rest_.empty(); }

  template <typename T>
  T number() {
    T value{};
    const size_t bytes = std::min(sizeof(T), rest_.size());
    if (bytes) std::memcpy(&value, rest_.data(), bytes);
    rest_ = rest_.subspan(bytes);
    return value;
  }
  // A number in [0, end).
  int below(int end) { return number<uint8_t>() % end; }
  bool flag() { return number<uint8_t>() % 2 != 0; }

  // `length` bytes; zeros after the end of the input.
  std::vector<std::byte> bytes(size_t length) {
    std::vector<std::byte> taken(length);
    const size_t given = std::min(length, rest_.size());
    if (given) std::memcpy(taken.data(), rest_.data(), given);
    rest_ = rest_.subspan(given);
    return taken;
  }
  std::vector<std::byte> rest() { return bytes(rest_.size()); }
  // `length` bytes that repeat a short pattern, so that short inputs give long messages.
  std::vector<std::byte> pattern(size_t length) {
    const auto part = bytes(1 + below(16));
    std::vector<std::byte> made(length);
    for (size_t i = 0; i < length; ++i) made[i] = part[i % part.size()];
    return made;
  }
  // A copy with a few changed bytes, and sometimes another length.
  std::vector<std::byte> corrupted(std::vector<std::byte> bytes) {
    for (int changes = below(4); changes > 0 && !bytes.empty(); --changes) {
      const size_t at = number<uint16_t>() % bytes.size();
      bytes[at] ^= number<std::byte>();
    }
    bytes.resize(near(bytes.size()));
    return {bytes.begin(), bytes.end()};  // without spare capacity
  }
  // A copy with structured changes: truncations, extreme numbers, moved and cleared parts.
  std::vector<std::byte> damaged(std::vector<std::byte> bytes) {
    constexpr uint32_t kExtremes[] = {0,          1,          0x7fff,     0x8000,    0xffff,
                                      0x7fffffff, 0x80000000, 0xffffffff, 0xfffffffb};
    for (int changes = 1 + below(4); changes > 0 && !bytes.empty(); --changes) {
      const size_t at = number<uint16_t>() % bytes.size();
      const size_t most = bytes.size() - at, count = std::min<size_t>(most, 1 + below(64));
      const size_t from = number<uint16_t>() % (bytes.size() - count + 1);
      const uint32_t extreme = kExtremes[below(9)];
      switch (below(6)) {
        case 0:
          bytes[at] ^= number<std::byte>();
          break;
        case 1:
          bytes.resize(at);
          break;
        case 2:
          bytes.insert(bytes.end(), count, number<std::byte>());
          break;
        case 3:
          std::memcpy(bytes.data() + at, &extreme, std::min(most, sizeof(extreme)));
          break;
        case 4:
          std::memmove(bytes.data() + at, bytes.data() + from, count);
          break;
        default:
          std::memset(bytes.data() + at, 0, count);
      }
    }
    return {bytes.begin(), bytes.end()};  // without spare capacity
  }
  // Usually `length`, sometimes a slightly smaller or larger number.
  size_t near(size_t length) {
    const int change = number<int8_t>();
    if (change % 4 != 0) return length;
    return static_cast<size_t>(std::max<int64_t>(0, static_cast<int64_t>(length) + change / 4));
  }

 private:
  std::span<const uint8_t> rest_;
};
