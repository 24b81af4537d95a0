#include "compressor/indices.h"

#include <bit>
#include <cstring>

#include "base/status.h"

namespace cgx {
namespace {

struct Shape {
  int low_bits;
  int64_t low_bytes, high_bits;

  Shape(int64_t numel, int64_t count)
      : low_bits(std::bit_width(static_cast<uint64_t>(numel / count)) - 1),
        low_bytes((count * low_bits + 7) / 8),
        high_bits(((numel - 1) >> low_bits) + count) {}
  int64_t high_bytes() const { return (high_bits + 7) / 8; }
};

// Loads eight bytes from `at` on; bytes beyond `end` are 0.
uint64_t load_word(const std::byte* at, const std::byte* end) {
  uint64_t word = 0;
  std::memcpy(&word, at, end - at < 8 ? end - at : 8);
  return word;
}

}  // namespace

int64_t indices_bytes(int64_t numel, int64_t count) {
  const Shape shape(numel, count);
  return shape.low_bytes + shape.high_bytes();
}

void write_indices(std::span<const uint32_t> indices, int64_t numel, std::byte* bytes) {
  const Shape shape(numel, static_cast<int64_t>(indices.size()));
  const uint64_t low_mask = (uint64_t{1} << shape.low_bits) - 1;
  uint64_t word = 0;
  int filled = 0;
  std::byte* low = bytes;
  for (const uint32_t index : indices) {
    word |= (index & low_mask) << filled;
    for (filled += shape.low_bits; filled >= 8; filled -= 8, word >>= 8)
      *low++ = static_cast<std::byte>(word);
  }
  if (filled > 0) *low = static_cast<std::byte>(word);
  std::byte* high = bytes + shape.low_bytes;
  std::memset(high, 0, shape.high_bytes());
  for (size_t i = 0; i < indices.size(); ++i) {
    const uint64_t bit = (indices[i] >> shape.low_bits) + i;
    high[bit / 8] |= std::byte{1} << (bit % 8);
  }
}

void read_indices(const std::byte* bytes, int64_t numel, std::span<uint32_t> indices) {
  const Shape shape(numel, static_cast<int64_t>(indices.size()));
  const std::byte* const high = bytes + shape.low_bytes;
  const std::byte* const end = high + shape.high_bytes();
  size_t found = 0;
  for (const std::byte* at = high; at < end; at += 8) {
    for (uint64_t word = load_word(at, end); word != 0; word &= word - 1) {
      const uint64_t bit = 8 * (at - high) + std::countr_zero(word);
      require(found < indices.size(), CGX_INVALID_ARGUMENT, "more than ", indices.size(),
              " indices");
      const int64_t low_at = static_cast<int64_t>(found) * shape.low_bits;
      const uint64_t low = load_word(bytes + low_at / 8, end) >> (low_at % 8) &
                           ((uint64_t{1} << shape.low_bits) - 1);
      const uint64_t index = (bit - found) << shape.low_bits | low;
      require(index < static_cast<uint64_t>(numel) && (found == 0 || index > indices[found - 1]),
              CGX_INVALID_ARGUMENT, "index ", index, " among ", numel, " values, after ",
              found == 0 ? 0 : indices[found - 1]);
      indices[found++] = static_cast<uint32_t>(index);
    }
  }
  require(found == indices.size(), CGX_INVALID_ARGUMENT, found, " indices instead of ",
          indices.size());
}

}  // namespace cgx
