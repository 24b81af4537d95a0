// The arithmetic of docs/reference/wire_format.md, operation by operation: without FMA contraction
// or flushing of denormals, and with one canonical NaN. Also storage, widening to fp32 and rounding
// of each Dtype.
//
// Except for NaN, the GPU's conversion instructions for 16-bit types give the bits of base/half.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/half.h"
#include "base/types.h"
#include "kernel/cuda/group.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include <cmath>
#endif

namespace cgx::device::cuda {

// ---- 1. operations, rounded to nearest even ----

CGX_LANE uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
CGX_LANE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

#if defined(__CUDACC__)
CGX_LANE float add(float a, float b) { return __fadd_rn(a, b); }
CGX_LANE float subtract(float a, float b) { return __fsub_rn(a, b); }
CGX_LANE float multiply(float a, float b) { return __fmul_rn(a, b); }
CGX_LANE float divide(float a, float b) { return __fdiv_rn(a, b); }
CGX_LANE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
CGX_LANE float smaller(float a, float b) { return fminf(a, b); }
CGX_LANE float square_root(float x) { return __fsqrt_rn(x); }
CGX_LANE double add(double a, double b) { return __dadd_rn(a, b); }
CGX_LANE double divide(double a, double b) { return __ddiv_rn(a, b); }
CGX_LANE float narrowed(double x) { return __double2float_rn(x); }
#else
CGX_LANE float add(float a, float b) { return a + b; }
CGX_LANE float subtract(float a, float b) { return a - b; }
CGX_LANE float multiply(float a, float b) { return a * b; }
CGX_LANE float divide(float a, float b) { return a / b; }
CGX_LANE float multiply_add(float a, float b, float c) { return std::fmaf(a, b, c); }
CGX_LANE float smaller(float a, float b) { return a < b ? a : b; }
CGX_LANE float square_root(float x) { return std::sqrt(x); }
CGX_LANE double add(double a, double b) { return a + b; }
CGX_LANE double divide(double a, double b) { return a / b; }
CGX_LANE float narrowed(double x) { return static_cast<float>(x); }
#endif

CGX_LANE constexpr float power_of_two(int exponent) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(127 + exponent) << 23);
}

// Rounds towards zero; magnitudes must be below 2^31.
CGX_LANE int32_t truncated(float x) { return static_cast<int32_t>(x); }
CGX_LANE float as_float(int32_t x) { return static_cast<float>(x); }

// Conversions between floats and integers are slow on a GPU, but a float in [2^23, 2^24) has an
// integer in its low bits.
inline constexpr float kInteger = 8388608.0f;         // 2^23
inline constexpr uint32_t kIntegerBits = 0x4b000000;  // its bits

// 2^23 + floor(x), for 0 <= x < 2^22.
CGX_LANE float floor_as_integer(float x) {
#if defined(__CUDACC__)
  return __fadd_rd(x, kInteger);
#else
  return std::floor(x) + kInteger;
#endif
}

CGX_LANE float magnitude_of(float x) { return __builtin_fabsf(x); }
CGX_LANE float with_one_nan(float x) { return x == x ? x : float_of(kFloat32Nan); }

// Integers in the order of the values, with -0 < +0, and NaNs beyond the infinities. The function
// is its own inverse.
CGX_LANE int32_t order_key(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }
CGX_LANE int32_t key_of(float x) { return order_key(static_cast<int32_t>(bits_of(x))); }
CGX_LANE float value_of_key(int32_t key) { return float_of(static_cast<uint32_t>(order_key(key))); }

// NaN if one is NaN; -0 < +0.
CGX_LANE float smaller_or_nan(float a, float b) {
#if defined(__CUDACC__)
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  if (is_nan(bits_of(a)) || is_nan(bits_of(b))) return float_of(kFloat32Nan);
  return key_of(a) < key_of(b) ? a : b;
#endif
}
CGX_LANE float larger_or_nan(float a, float b) {
#if defined(__CUDACC__)
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  if (is_nan(bits_of(a)) || is_nan(bits_of(b))) return float_of(kFloat32Nan);
  return key_of(a) > key_of(b) ? a : b;
#endif
}

// The bits of 1, as a value that the compiler does not know: an instruction has room for one
// constant, so a second one would need another instruction.
#if defined(__CUDACC__)
static __constant__ uint32_t unknown_one = 0x3f800000;
CGX_LANE uint32_t one_in_register() { return unknown_one; }
#else
CGX_LANE uint32_t one_in_register() { return 0x3f800000; }
#endif

// The op of uncompressed values. NaN wins.
CGX_LANE float combine(Op op, float a, float b) {
  if (op == Op::kProduct) return multiply(a, b);
  if (op != Op::kMin && op != Op::kMax) return add(a, b);
  const int32_t key_a = key_of(a), key_b = key_of(b);
  if (is_nan(bits_of(a)) || is_nan(bits_of(b))) return float_of(kFloat32Nan);
  return value_of_key((op == Op::kMin) == (key_a < key_b) ? key_a : key_b);
}

// ---- 2. values ----

struct Float32 {
  using Bits = uint32_t;
  CGX_LANE static float widen(uint32_t bits) { return float_of(bits); }
  CGX_LANE static uint32_t round(float x) { return bits_of(x); }
};

#if defined(__CUDACC__)
struct Float16 {
  using Bits = uint16_t;
  static constexpr float kLargest = kLargestFloat16;
  CGX_LANE static float widen(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
  CGX_LANE static uint16_t round(float x) {
    const uint16_t rounded = __half_as_ushort(__float2half_rn(x));
    return is_nan(bits_of(x)) ? kFloat16Nan : rounded;
  }
};
struct Bfloat16 {
  using Bits = uint16_t;
  static constexpr float kLargest = kLargestBfloat16;
  CGX_LANE static float widen(uint16_t bits) { return widen_bfloat16(bits); }
  CGX_LANE static uint16_t round(float x) {
    const uint16_t rounded = __bfloat16_as_ushort(__float2bfloat16_rn(x));
    return is_nan(bits_of(x)) ? kBfloat16Nan : rounded;
  }
};
#else
struct Float16 {
  using Bits = uint16_t;
  static constexpr float kLargest = kLargestFloat16;
  static float widen(uint16_t bits) { return widen_float16(bits); }
  static uint16_t round(float x) { return round_to_float16(x); }
};
struct Bfloat16 {
  using Bits = uint16_t;
  static constexpr float kLargest = kLargestBfloat16;
  static float widen(uint16_t bits) { return widen_bfloat16(bits); }
  static uint16_t round(float x) { return round_to_bfloat16(x); }
};
#endif

// The type for values sent in 16 bits: fp16 for fp16 tensors, otherwise bf16.
template <typename Value>
using HalfOf = std::conditional_t<std::is_same_v<Value, Float16>, Float16, Bfloat16>;

// Stochastic rounding, as in base/half.h. `noise` is uniform in [0, 2^16).
CGX_LANE uint16_t round_noisily(Float16, float x, uint32_t noise) {
  return round_noisily_to_float16(x, noise);
}
CGX_LANE uint16_t round_noisily(Bfloat16, float x, uint32_t noise) {
  return round_noisily_to_bfloat16(x, noise);
}

}  // namespace cgx::device::cuda
