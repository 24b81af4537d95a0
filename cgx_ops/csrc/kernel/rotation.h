// What all processors know of a rotation (docs/reference/wire_format.md): a bucket is cut into groups of
// `size` rows of sixteen values, and a last one of as many columns as are left; what fills no row
// is not rotated. A group's columns are transformed side by side: signs, then a Hadamard matrix,
// divided by the root of `size` by powers of two: a part of it on the way there, the rest on the
// way back.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace cgx {

inline constexpr int kRotationColumns = 16;

// The sign bit of value p of a group, or 0: the top bit of a multiple of the golden ratio, which is
// as good as random.
CGX_HD uint32_t rotation_sign(uint32_t p) { return p * 0x9e3779b1u & 0x80000000u; }

// By what the last step of a transform multiplies, of size 2^log.
CGX_HD float rotation_scale(int log, bool back) {
  const int shift = back ? log - log / 2 : log / 2;
  return __builtin_bit_cast(float, static_cast<uint32_t>(127 - shift) << 23);  // 2^-shift
}

}  // namespace cgx
