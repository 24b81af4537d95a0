// Constants of the rotation (docs/reference/compressor_formats.md), for all processors. A bucket is
// cut into groups of `size` rows of sixteen values, and a last group with as many columns as
// remain. Values that fill no row are not rotated. The columns of a group are transformed in
// parallel: signs, then a Hadamard matrix. The division by the square root of `size` is split into
// two powers of two: one in the forward and one in the backward transform.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace cgx {

inline constexpr int kRotationColumns = 16;

// The sign bit of value p of a group, or 0: the top bit of a multiple of the golden ratio, which is
// sufficiently random.
CGX_HD uint32_t rotation_sign(uint32_t p) { return p * 0x9e3779b1u & 0x80000000u; }

// The factor of the last step of a transform of size 2^log.
CGX_HD float rotation_scale(int log, bool back) {
  const int shift = back ? log - log / 2 : log / 2;
  return __builtin_bit_cast(float, static_cast<uint32_t>(127 - shift) << 23);  // 2^-shift
}

}  // namespace cgx
