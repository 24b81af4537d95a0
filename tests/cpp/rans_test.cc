// The entropy coder: streams of every target, bitwise equal to a coder that divides; malformed
// streams; planes; frequencies.
//
// Exits with 1 if any check failed.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "buffers.h"
#include "checks.h"
#include "compressor/frequencies.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

using namespace test;
using Symbols = std::vector<uint8_t>;
using Stream = std::vector<std::byte>;

// ---- a coder that divides, symbol by symbol ----

Stream slow_encode(const Symbols& symbols, int lanes, const Frequencies& frequencies) {
  std::vector<uint32_t> states(lanes, 1 << 15);
  std::vector<uint16_t> words;
  for (size_t i = symbols.size(); i-- > 0;) {
    uint32_t& state = states[i % lanes];
    uint32_t start = 0;
    for (int s = 0; s < symbols[i]; ++s) start += frequencies[s];
    const uint32_t f = frequencies[symbols[i]];
    if (state / f >= 1 << 19) {
      words.push_back(static_cast<uint16_t>(state));
      state >>= 16;
    }
    state = state / f * kFrequencySum + start + state % f;
  }
  std::reverse(words.begin(), words.end());
  Stream stream(4 * states.size() + 2 * words.size());
  std::memcpy(stream.data(), states.data(), 4 * states.size());
  if (!words.empty())
    std::memcpy(stream.data() + 4 * states.size(), words.data(), 2 * words.size());
  return stream;
}

Counts counts_of(const Symbols& symbols) {
  Counts counts{};
  for (const uint8_t symbol : symbols) ++counts[symbol];
  return counts;
}

Stream encode(const Kernels& target, const Symbols& symbols, int lanes,
              const Frequencies& frequencies, const std::string& where) {
  const auto numel = static_cast<int64_t>(symbols.size());
  Unaligned room(most_rans_bytes(numel, lanes));
  const int64_t size =
      target.rans_encode(symbols.data(), numel, lanes, frequencies.data(), room.data());
  CHECK(room.guard_intact(), where);
  return {room.data(), room.data() + size};
}

// Decodes memory of exactly this size, so that sanitizers detect other accesses.
bool decode(const Kernels& target, const Stream& stream, int lanes, const Frequencies& frequencies,
            Symbols& symbols) {
  return target.rans_decode(stream.data(), static_cast<int64_t>(stream.size()),
                            static_cast<int64_t>(symbols.size()), lanes, frequencies.data(),
                            symbols.data());
}

// ---- inputs ----

constexpr const char* kKinds[] = {"one", "two", "all", "skewed", "rare", "geometric"};

Symbols make_symbols(int kind, int64_t numel) {
  static std::mt19937 random(46);
  static std::geometric_distribution<int> geometric(0.4);
  Symbols symbols(static_cast<size_t>(numel));
  for (uint8_t& s : symbols) {
    const uint32_t bits = random();
    if (kind == 0) s = 7;
    if (kind == 1) s = bits % 3 == 0 ? 255 : 0;
    if (kind == 2) s = static_cast<uint8_t>(bits);
    if (kind == 3) s = static_cast<uint8_t>(__builtin_clz(bits | 1) + (bits & 1) * 100);
    if (kind == 4) s = bits % 10000 == 0 ? static_cast<uint8_t>(bits >> 20) : 100;
    if (kind == 5) s = static_cast<uint8_t>(std::min(geometric(random), 255));
  }
  return symbols;
}

// ---- tests ----

void test_counts(const Kernels& target, const Symbols& symbols, const std::string& where) {
  Counts counts;
  target.count_symbols(symbols.data(), static_cast<int64_t>(symbols.size()), counts.data());
  CHECK(counts == counts_of(symbols), where);
}

void test_streams(const Symbols& symbols, int lanes, const Frequencies& frequencies,
                  const std::string& where) {
  const Stream expected = slow_encode(symbols, lanes, frequencies);
  for (const Kernels* target : available_kernels()) {
    const std::string here = join(target->name, ", ", where);
    test_counts(*target, symbols, here);
    CHECK(encode(*target, symbols, lanes, frequencies, here) == expected, here);
    Symbols decoded(symbols.size());
    CHECK(decode(*target, expected, lanes, frequencies, decoded) && decoded == symbols, here);
    Stream other = expected;
    other.resize(other.size() - 2);
    CHECK(!decode(*target, other, lanes, frequencies, decoded), here);
    for (const size_t more : {2, 100000}) {
      other.resize(expected.size() + more);
      CHECK(!decode(*target, other, lanes, frequencies, decoded), here);
    }
    other = expected;
    other.resize(expected.size() - 1);
    CHECK(!decode(*target, other, lanes, frequencies, decoded), here);
    other = expected;
    other[4 * lanes - 1] |= std::byte{0x80};  // a state that is too large
    CHECK(!decode(*target, other, lanes, frequencies, decoded), here);
    other = expected;
    std::memset(other.data() + 4 * (lanes - 1), 0, 4);  // and one that is too small
    CHECK(!decode(*target, other, lanes, frequencies, decoded), here);
  }
}

void test_all_streams() {
  for (int kind = 0; kind < 6; ++kind) {
    for (const int64_t numel :
         {1, 2, 17, 31, 32, 33, 63, 64, 511, 512, 513, 5000, 65535, 65536, 65537}) {
      const Symbols symbols = make_symbols(kind, numel);
      const Frequencies frequencies = frequencies_of(counts_of(symbols));
      for (int lanes = 1; lanes <= kMostRansLanes; lanes *= 2)
        if (numel < 10000 || lanes >= 8 || kind == 5)
          test_streams(symbols, lanes, frequencies,
                       join(numel, " symbols (", kKinds[kind], "), lanes ", lanes));
    }
  }
  const int64_t numel = (1 << 20) + 7;
  const Symbols symbols = make_symbols(5, numel);
  test_streams(symbols, rans_lanes(numel), frequencies_of(counts_of(symbols)), "2^20 + 7");
  test_streams({}, 1, frequencies_of(counts_of({3})), "no symbols");
}

// All frequencies, and many states: the division is exact.
void test_division() {
  std::mt19937 random(1);
  for (int frequency = 1; frequency < kFrequencySum; ++frequency) {
    Frequencies frequencies{};
    frequencies[3] = static_cast<uint16_t>(frequency);
    frequencies[9] = static_cast<uint16_t>(kFrequencySum - frequency);
    Symbols symbols(200);
    for (uint8_t& s : symbols) s = static_cast<int>(random() % kFrequencySum) < frequency ? 3 : 9;
    const Stream expected = slow_encode(symbols, 8, frequencies);
    for (const Kernels* target : available_kernels()) {
      const std::string where = join(target->name, ", frequency ", frequency);
      CHECK(encode(*target, symbols, 8, frequencies, where) == expected, where);
      Symbols decoded(symbols.size());
      CHECK(decode(*target, expected, 8, frequencies, decoded) && decoded == symbols, where);
    }
  }
}

// All targets accept the same damaged streams, with the same symbols.
void test_damaged() {
  std::mt19937 random(2);
  for (int round = 0; round < 2000; ++round) {
    const int lanes = 1 << random() % 6;
    const Symbols symbols = make_symbols(static_cast<int>(random() % 6), 1 + random() % 700);
    const Frequencies frequencies = frequencies_of(counts_of(symbols));
    Stream stream = slow_encode(symbols, lanes, frequencies);
    for (int changes = 1 + random() % 3; changes > 0; --changes)
      stream[random() % stream.size()] ^= static_cast<std::byte>(1 << random() % 8);
    if (random() % 4 == 0) stream.resize(random() % stream.size());
    Symbols first(symbols.size());
    const bool accepted = decode(*available_kernels()[0], stream, lanes, frequencies, first);
    for (const Kernels* target : available_kernels()) {
      Symbols decoded(symbols.size());
      CHECK(decode(*target, stream, lanes, frequencies, decoded) == accepted, target->name);
      CHECK(!accepted || decoded == first, target->name);
    }
  }
}

void test_planes() {
  std::mt19937 random(4);
  for (const int64_t width : {2, 4}) {
    for (const int64_t numel : {0, 1, 15, 17, 100, 16384}) {
      Unaligned values(numel * width);
      for (int64_t i = 0; i < numel * width; ++i)
        values.data()[i] = static_cast<std::byte>(random());
      Symbols expected;  // plane after plane
      for (int64_t p = 0; p < width; ++p) {
        for (int64_t i = 0; i < numel; ++i) {
          uint32_t value = 0;
          std::memcpy(&value, values.data() + i * width, width);
          const uint32_t sign = value >> (8 * width - 1);
          expected.push_back(static_cast<uint8_t>((value << 1 | sign) >> 8 * (width - 1 - p)));
        }
      }
      for (const Kernels* target : available_kernels()) {
        const std::string where = join(target->name, ", ", numel, " values of ", width, " bytes");
        Symbols found(expected.size());
        uint8_t* planes[4] = {};
        for (int64_t p = 0; p < width; ++p) planes[p] = found.data() + p * numel;
        target->split_planes(width, values.data(), numel, planes);
        CHECK(found == expected, where);
        Unaligned joined(numel * width);
        target->join_planes(width, planes, numel, joined.data());
        CHECK(joined == values, where);
      }
    }
  }
}

int sum_of(const Frequencies& frequencies) {
  int sum = 0;
  for (const uint16_t f : frequencies) sum += f;
  return sum;
}

void test_costs() {
  for (int f = 1; f <= kFrequencySum; ++f) {
    const double exact = -std::log2(f / 4096.0) * (1 << kCostBits);
    CHECK(cost_of(f) >= exact - 1e-6 && cost_of(f) < exact + 1.1, std::to_string(f));
  }
}

// Compares with moving 1 from any frequency to any other.
void test_optimal(const Counts& counts, const Frequencies& frequencies, const std::string& where) {
  const int64_t cost = cost_of(counts, frequencies);
  int64_t best = cost;
  for (int from = 0; from < kSymbols; ++from) {
    if (frequencies[from] < 2) continue;
    for (int to = 0; to < kSymbols; ++to) {
      if (frequencies[to] == 0) continue;
      Frequencies moved = frequencies;
      --moved[from], ++moved[to];
      best = std::min(best, cost_of(counts, moved));
    }
  }
  CHECK(static_cast<double>(cost - best) <= 1e-4 * static_cast<double>(cost), where);
}

void test_frequencies() {
  std::byte bytes[kMostFrequencyBytes + 1];
  for (int kind = 0; kind < 6; ++kind) {
    for (const int64_t numel : {1, 2, 17, 512, 65536}) {
      const std::string where = join(numel, " symbols (", kKinds[kind], ")");
      const Counts counts = counts_of(make_symbols(kind, numel));
      const Frequencies frequencies = frequencies_of(counts);
      int present = 0;
      for (int s = 0; s < kSymbols; ++s) {
        CHECK((counts[s] != 0) == (frequencies[s] != 0), where);
        present += counts[s] != 0;
      }
      CHECK(sum_of(frequencies) == kFrequencySum, where);
      if (numel <= 512) test_optimal(counts, frequencies, where);
      const int64_t size = write_frequencies(frequencies, bytes);
      CHECK(size <= 4 + (present < 30 ? 3.5 : 1.4) * present, join(where, ": ", size, " bytes"));
      Frequencies read;
      CHECK(read_frequencies(bytes, kSymbols, read) == size && read == frequencies, where);
      const std::span<const std::byte> all(bytes, size);
      error_of([&] { read_frequencies(all.first(size - 1), kSymbols, read); },
               CGX_INVALID_ARGUMENT);
      int last = kSymbols - 1;
      while (frequencies[last] == 0) --last;
      CHECK(error_of([&] { read_frequencies(all, last, read); }, CGX_INVALID_ARGUMENT) != "",
            where);
      CHECK(read_frequencies(all, last + 1, read) == size, where);
    }
  }
}

// Whatever is accepted has the right sum, and is what the writer writes.
void test_any_frequencies() {
  std::mt19937 random(3);
  std::byte bytes[64], again[kMostFrequencyBytes];
  int accepted = 0;
  for (int round = 0; round < 200000; ++round) {
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    for (int i = 1 + random() % 8; i < 64 && round % 2; ++i) bytes[i] = std::byte{0};
    Frequencies read;
    try {
      const int64_t size = read_frequencies(bytes, kSymbols, read);
      ++accepted;
      CHECK(sum_of(read) == kFrequencySum, std::to_string(round));
      CHECK(write_frequencies(read, again) == size && std::memcmp(bytes, again, size) == 0,
            std::to_string(round));
    } catch (const Error& error) {
      CHECK(error.status() == CGX_INVALID_ARGUMENT, error.what());
    }
  }
  CHECK(accepted > 50, std::to_string(accepted));
}

int run() {
  test_costs();
  test_frequencies();
  test_any_frequencies();
  test_division();
  test_planes();
  test_damaged();
  test_all_streams();
  std::string names = " on";
  for (const Kernels* target : available_kernels()) names += std::string(" ") + target->name;
  return report(names);
}

}  // namespace
}  // namespace cgx

int main() { return cgx::run(); }
