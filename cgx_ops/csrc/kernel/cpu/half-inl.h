// Values of 16 bits, rounded at random between the two next to each, so unbiased.
#pragma once

#include <cstdint>

#include "kernel/cpu/noise-inl.h"
#include "kernel/cpu/values-inl.h"
#include "kernel/cpu/vectors-inl.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

// `noise`: one of 2^16 numbers, all as likely. The bits that a bf16 lacks plus noise carry into
// those that it has. What is finite stays so.
[[gnu::always_inline]] inline uint16_t round_noisily(Bfloat16, float value, uint32_t noise) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t rounded = (magnitude + noise) >> 16;
  rounded = rounded > 0x7f7fu ? 0x7f7fu : rounded;
  rounded = magnitude >= 0x7f800000u ? round_to_bfloat16(value) & 0x7fffu : rounded;
  const uint32_t sign = is_nan(bits) ? 0 : bits >> 16 & 0x8000u;
  return static_cast<uint16_t>(rounded | sign);
}

// Likewise; below 2^-14 an fp16 counts units of 2^-24. What is too large becomes infinite.
[[gnu::always_inline]] inline uint16_t round_noisily(Float16, float value, uint32_t noise) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + (noise >> 3) - ((127u - 15u) << 23)) >> 13;
  const float units =
      __builtin_bit_cast(float, magnitude < 0x38800000u ? magnitude : 0u) * 16777216.0f;
  const auto denormal =
      static_cast<uint32_t>(units + (static_cast<float>(noise) + 0.5f) * (1.0f / 65536.0f));
  uint32_t rounded = magnitude < 0x38800000u ? denormal : normal;
  rounded = rounded > 0x7c00u || magnitude >= 0x47800000u ? 0x7c00u : rounded;
  rounded = is_nan(bits) ? uint32_t{kFloat16Nan} : rounded;
  const uint32_t sign = is_nan(bits) ? 0 : bits >> 16 & 0x8000u;
  return static_cast<uint16_t>(rounded | sign);
}

template <typename From, typename To>
void convert_noisily_as(const void* from_bytes, int64_t numel, int64_t first_index,
                        const Rounding& rounding, void* to_bytes) {
  const auto* __restrict from = static_cast<const Stored<typename From::Bits>*>(from_bytes);
  auto* __restrict to = static_cast<Stored<uint16_t>*>(to_bytes);
  Noise noise(rounding);
  for (int64_t i = 0; i < numel; i += kSixteen) {
    const Floats16 r = noise.at(static_cast<uint64_t>(first_index + i));
    alignas(64) int32_t drawn[kSixteen];
    store_registers(
        map<Ints16>(r, [](Floats x) { return __builtin_convertvector(x * 65536.0f - 0.5f, Ints); }),
        drawn);
    const int64_t count = numel - i < kSixteen ? numel - i : kSixteen;
    for (int64_t j = 0; j < count; ++j)
      to[i + j].value =
          round_noisily(To{}, From::widen(from[i + j].value), static_cast<uint32_t>(drawn[j]));
  }
}

// `to_type` has 16 bits.
void convert_noisily(Dtype from_type, const void* from, int64_t numel, int64_t first_index,
                     const Rounding& rounding, Dtype to_type, void* to) {
  with_value_type(from_type, [&](auto source) {
    if (to_type == Dtype::kBfloat16)
      convert_noisily_as<decltype(source), Bfloat16>(from, numel, first_index, rounding, to);
    else
      convert_noisily_as<decltype(source), Float16>(from, numel, first_index, rounding, to);
  });
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
