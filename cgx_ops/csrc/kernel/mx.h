// MXFP8 and MXFP4 of OCP Microscaling Formats 1.0: each block has a scale in e8m0, a power of two.
#pragma once

#include <cstdint>

#include "base/half.h"
#include "base/host_device.h"
#include "kernel/elements.h"

namespace cgx::mx {

inline constexpr uint32_t kNan = 0xff;

CGX_HD float scale_of_byte(uint32_t byte) {
  constexpr uint32_t kLowest = 0x00400000;  // 2^-127, a subnormal number
  const uint32_t power = byte == 0 ? kLowest : byte << 23;
  return __builtin_bit_cast(float, byte == kNan ? kFloat32Nan : power);
}

// 2^(floor(log2(largest)) - the element's highest exponent), at least 2^-127.
CGX_HD BlockScale scale_of_block(float largest, const Element& element) {
  const uint32_t exponent = __builtin_bit_cast(uint32_t, largest) >> 23;
  const auto highest = static_cast<uint32_t>(element.highest_exponent());
  const uint32_t power = exponent > highest ? exponent - highest : 0;
  const uint32_t byte = exponent == 0xff ? kNan : power;
  return {byte, scale_of_byte(byte), __builtin_bit_cast(float, (254 - power) << 23)};
}

}  // namespace cgx::mx
