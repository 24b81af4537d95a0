// Stochastic rounding to 16 bits, unbiased.
#pragma once

#include <cstdint>

#include "base/half.h"
#include "kernel/cpu/noise-inl.h"
#include "kernel/cpu/values-inl.h"
#include "kernel/cpu/vectors-inl.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

// round(value, noise) returns 16 bits.
template <typename From, typename Round>
void convert_noisily_as(const void* from_bytes, int64_t numel, int64_t first_index,
                        const Rounding& rounding, void* to_bytes, const Round& round) {
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
      to[i + j].value = round(From::widen(from[i + j].value), static_cast<uint32_t>(drawn[j]));
  }
}

// `to_type` has 16 bits.
void convert_noisily(Dtype from_type, const void* from, int64_t numel, int64_t first_index,
                     const Rounding& rounding, Dtype to_type, void* to) {
  with_value_type(from_type, [&](auto source) {
    using From = decltype(source);
    const auto to_bfloat16 = [](float x, uint32_t u) { return round_noisily_to_bfloat16(x, u); };
    const auto to_float16 = [](float x, uint32_t u) { return round_noisily_to_float16(x, u); };
    if (to_type == Dtype::kBfloat16)
      convert_noisily_as<From>(from, numel, first_index, rounding, to, to_bfloat16);
    else
      convert_noisily_as<From>(from, numel, first_index, rounding, to, to_float16);
  });
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
