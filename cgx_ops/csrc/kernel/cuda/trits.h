// Packs trits into bytes (docs/reference/compressor_formats.md): five per byte, in groups of 80,
// whose byte j has codes j, 16 + j, ... 64 + j. In a last group of b bytes the distance is b. In
// registers, the codes of a unit have two bits each.
//
//   1. eight trits of a field
//   2. a tile's codes -> a field
#pragma once

#include <cstdint>

#include "kernel/cuda/memory.h"
#include "kernel/cuda/work.h"

namespace cgx::device::cuda {

inline constexpr int kTritBytes = 16, kTrits = 5 * kTritBytes;  // of a group

// ---- 1. unpack ----

// The offset of a value's group in a bucket's field.
CGX_LANE int64_t trit_group_at(int64_t element) { return element / kTrits * kTritBytes; }

// Loads the unit that begins at `element` of a bucket of `numel`. `field` is the offset in the
// buffer of byte `first_byte` of the bucket's field.
CGX_LANE uint64_t load_trits(const std::byte* buffer, int field, int64_t first_byte,
                             int64_t element, int64_t numel, int count) {
  const int64_t group = element - element % kTrits;
  const int apart = numel - group < kTrits ? static_cast<int>((numel - group + 4) / 5) : kTritBytes;
  const int at = field + static_cast<int>(trit_group_at(element) - first_byte);
  const auto in_group = static_cast<int>(element - group);
  uint64_t codes = 0;
  CGX_ROLLED
  for (int i = 0; i < count; ++i) {
    const int digit = (in_group + i) / apart;
    auto rest = static_cast<uint32_t>(load<uint8_t>(buffer + at + (in_group + i) % apart));
    CGX_ROLLED
    for (int j = 0; j < digit; ++j) rest /= 3;
    // A byte of 243 or more, which no rank writes, gives an invalid code.
    codes |= uint64_t{digit == 4 ? rest & 3 : rest % 3} << (2 * i);
  }
  return codes;
}

// ---- 2. pack ----

// Converts eight codes from two bits to one byte each.
CGX_LANE uint64_t spread_trits(uint64_t field) {
  uint64_t bytes = 0;
  CGX_UNROLL
  for (int i = 0; i < kUnit; ++i) bytes |= (field >> (2 * i) & 3) << (8 * i);
  return bytes;
}

// A lane's part of packing the field of `numel` codes, one byte each: whole groups, or the end of a
// bucket.
template <int kLanes>
CGX_LANE void pack_trits(int lane, const std::byte* codes, int numel, std::byte* field) {
  const int whole = numel / kTrits * kTrits;
  const int apart_at_end = (numel - whole + 4) / 5;
  CGX_ROLLED
  for (int i = lane; i < whole / 5 + apart_at_end; i += kLanes) {
    const bool last = i >= whole / 5;
    const int apart = last ? apart_at_end : kTritBytes;
    const int first = last ? whole + i - whole / 5 : i / kTritBytes * kTrits + i % kTritBytes;
    uint32_t packed = 0;
    CGX_UNROLL
    for (int digit = 4; digit >= 0; --digit) {
      const int at = first + digit * apart;
      packed = packed * 3 + (at < numel ? uint32_t{load<uint8_t>(codes + at)} : 1u);
    }
    store(field + i, static_cast<uint8_t>(packed));
  }
}

}  // namespace cgx::device::cuda
