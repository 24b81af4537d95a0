// Conversion between fp16 or bf16 and fp32. Compilers vectorize it, and all targets give the same
// bits. Widening is exact. Rounding is to nearest even or stochastic. Every NaN becomes one quiet
// NaN, because hardware differs otherwise.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace cgx {

inline constexpr uint32_t kFloat32Nan = 0x7fc00000;
inline constexpr uint16_t kFloat16Nan = 0x7e00;
inline constexpr uint16_t kBfloat16Nan = 0x7fc0;
inline constexpr float kLargestFloat16 = 65504.0f;
inline constexpr float kLargestBfloat16 = 0x1.fep127f;

CGX_HD bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

CGX_HD bool is_finite(float x) {
#if defined(__CUDA_ARCH__)
  return __builtin_fabsf(x) < __builtin_huge_valf();  // one instruction
#else
  return (__builtin_bit_cast(uint32_t, x) & 0x7f800000u) != 0x7f800000u;
#endif
}

// Makes a residual finite, before it is rounded to this dtype: an infinite residual would make all
// later results non-finite.
template <typename Value>
CGX_HD float kept_in_residual(float x) {
  float kept = is_finite(x) ? x : 0.0f;
  if constexpr (sizeof(typename Value::Bits) == 2) {
    kept = kept < Value::kLargest ? kept : Value::kLargest;
    kept = kept > -Value::kLargest ? kept : -Value::kLargest;
  }
  return kept;
}

CGX_HD float widen_bfloat16(uint16_t bits) {
  return __builtin_bit_cast(float, uint32_t{bits} << 16);
}

CGX_HD uint16_t round_to_bfloat16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(is_nan(bits) ? uint32_t{kBfloat16Nan} : rounded);
}

CGX_HD float widen_float16(uint16_t bits) {
  constexpr uint32_t kRebias = (127u - 15u) << 23;
  constexpr uint32_t kSmallest = 113u << 23;  // 2^-14, the smallest normal fp16
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t shifted = (bits & 0x7fffu) << 13;
  const uint32_t exponent = shifted & 0x0f800000u;
  // For infinity and NaN, a second bias makes the exponent 255.
  const uint32_t normal = shifted + kRebias + (exponent == 0x0f800000u ? kRebias : 0u);
  // A denormal m * 2^-24 equals 2^-14 * (1 + m / 2^10) - 2^-14. This uses normal numbers only and
  // is exact, so it does not depend on how the processor treats denormals.
  const uint32_t denormal =
      __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, shifted + kSmallest) -
                                       __builtin_bit_cast(float, kSmallest));
  return __builtin_bit_cast(float, (exponent == 0 ? denormal : normal) | sign);
}

CGX_HD uint16_t round_to_float16(float value) {
  constexpr uint32_t kRebias = (127u - 15u) << 23;
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - kRebias) >> 13;
  // Below 2^-14 the result counts units of 2^-24, the unit in the last place of 0.5, so adding 0.5
  // rounds. An fp32 denormal is far below half a unit, so flushing it changes nothing.
  const uint32_t denormal =
      __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude) + 0.5f) - 0x3f000000u;
  uint32_t rounded = magnitude < 0x38800000u ? denormal : normal;
  rounded = magnitude >= 0x47800000u ? 0x7c00u : rounded;  // 65536 and above
  rounded |= sign;
  return static_cast<uint16_t>(is_nan(bits) ? uint32_t{kFloat16Nan} : rounded);
}

// Stochastic rounding, unbiased. `noise` is uniform in [0, 2^16). It is added to the bits that bf16
// lacks and carries into those that it has. Finite values stay finite.
CGX_HD uint16_t round_noisily_to_bfloat16(float value, uint32_t noise) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t rounded = (magnitude + noise) >> 16;
  rounded = rounded > 0x7f7fu ? 0x7f7fu : rounded;
  rounded = magnitude >= 0x7f800000u ? round_to_bfloat16(value) & 0x7fffu : rounded;
  const uint32_t sign = is_nan(bits) ? 0 : bits >> 16 & 0x8000u;
  return static_cast<uint16_t>(rounded | sign);
}

// The same for fp16. Below 2^-14 it counts units of 2^-24. Values out of range become infinite.
CGX_HD uint16_t round_noisily_to_float16(float value, uint32_t noise) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + (noise >> 3) - ((127u - 15u) << 23)) >> 13;
  const float small = __builtin_bit_cast(float, magnitude < 0x38800000u ? magnitude : 0u);
  const float units = rounded_product(small, 16777216.0f);
  const float drawn =
      rounded_product(rounded_sum(static_cast<float>(noise), 0.5f), 1.0f / 65536.0f);
  const auto denormal = static_cast<uint32_t>(rounded_sum(units, drawn));
  uint32_t rounded = magnitude < 0x38800000u ? denormal : normal;
  rounded = rounded > 0x7c00u || magnitude >= 0x47800000u ? 0x7c00u : rounded;
  rounded = is_nan(bits) ? uint32_t{kFloat16Nan} : rounded;
  const uint32_t sign = is_nan(bits) ? 0 : bits >> 16 & 0x8000u;
  return static_cast<uint16_t>(rounded | sign);
}

}  // namespace cgx
