// 16-bit scales of buckets, and scales for squaring. Bit operations only, so all processors give
// the same results.
#pragma once

#include <cstdint>

#include "base/half.h"
#include "base/host_device.h"

namespace cgx {

inline constexpr uint32_t kLargestBfloat16Bits = __builtin_bit_cast(uint32_t, kLargestBfloat16);

// Rounds a finite value to the nearest bf16, but never to infinity.
CGX_HD float nearest_scale(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t rounded = uint32_t{round_to_bfloat16(x)} << 16;
  const bool finite = (rounded & 0x7fffffffu) <= kLargestBfloat16Bits;
  return __builtin_bit_cast(float, finite ? rounded : kLargestBfloat16Bits | (bits & 0x80000000u));
}

// Returns the smallest bf16 that is not less than a finite x >= 0, or the largest bf16.
CGX_HD float scale_above(float x) {
  const uint32_t bits = (__builtin_bit_cast(uint32_t, x) + 0xffffu) & 0xffff0000u;
  return __builtin_bit_cast(float, bits < kLargestBfloat16Bits ? bits : kLargestBfloat16Bits);
}

// The factor applied to values before they are squared or summed, and its inverse. It is 1 if the
// largest magnitude is between 2^-32 and 2^32, otherwise a power of two that brings it between 1
// and 4. So no relevant square overflows or underflows.
struct Prescale {
  float down, up;
};
CGX_HD Prescale prescale_of(float largest) {
  constexpr uint32_t kOne = 127;  // the exponent field of 1
  uint32_t exponent = __builtin_bit_cast(uint32_t, largest) >> 23;
  if (exponent >= kOne - 32 && exponent < kOne + 32) return {1.0f, 1.0f};
  exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
  return {__builtin_bit_cast(float, (254 - exponent) << 23),
          __builtin_bit_cast(float, exponent << 23)};
}

}  // namespace cgx
