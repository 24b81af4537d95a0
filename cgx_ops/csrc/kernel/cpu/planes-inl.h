// Values as planes of bytes: a value is rotated left by one bit, so that its sign becomes the
// lowest bit, and plane p has byte p of each value, from the highest on.
#pragma once

#include <cstdint>

#include "kernel/cpu/values-inl.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

template <typename Bits>
void split_planes_of(const void* from, int64_t numel, uint8_t* const* planes) {
  constexpr int kWidth = 8 * sizeof(Bits);
  const auto* __restrict values = static_cast<const Stored<Bits>*>(from);
  uint8_t* __restrict plane0 = planes[0];
  uint8_t* __restrict plane1 = planes[1];
  uint8_t* __restrict plane2 = sizeof(Bits) == 4 ? planes[2] : nullptr;
  uint8_t* __restrict plane3 = sizeof(Bits) == 4 ? planes[3] : nullptr;
  for (int64_t i = 0; i < numel; ++i) {
    const Bits value = values[i].value;
    const auto rotated = static_cast<Bits>(value << 1 | value >> (kWidth - 1));
    plane0[i] = static_cast<uint8_t>(rotated >> (kWidth - 8));
    plane1[i] = static_cast<uint8_t>(rotated >> (kWidth - 16));
    if constexpr (kWidth == 32) {
      plane2[i] = static_cast<uint8_t>(rotated >> 8);
      plane3[i] = static_cast<uint8_t>(rotated);
    }
  }
}

void split_planes(int64_t width, const void* values, int64_t numel, uint8_t* const* planes) {
  if (width == 4) return split_planes_of<uint32_t>(values, numel, planes);
  split_planes_of<uint16_t>(values, numel, planes);
}

template <typename Bits>
void join_planes_of(const uint8_t* const* planes, int64_t numel, void* to) {
  constexpr int kWidth = 8 * sizeof(Bits);
  auto* __restrict values = static_cast<Stored<Bits>*>(to);
  const uint8_t* __restrict plane0 = planes[0];
  const uint8_t* __restrict plane1 = planes[1];
  const uint8_t* __restrict plane2 = sizeof(Bits) == 4 ? planes[2] : nullptr;
  const uint8_t* __restrict plane3 = sizeof(Bits) == 4 ? planes[3] : nullptr;
  for (int64_t i = 0; i < numel; ++i) {
    Bits rotated =
        static_cast<Bits>(Bits{plane0[i]} << (kWidth - 8) | Bits{plane1[i]} << (kWidth - 16));
    if constexpr (kWidth == 32) rotated |= Bits{plane2[i]} << 8 | Bits{plane3[i]};
    values[i].value = static_cast<Bits>(rotated >> 1 | rotated << (kWidth - 1));
  }
}

void join_planes(int64_t width, const uint8_t* const* planes, int64_t numel, void* values) {
  if (width == 4) return join_planes_of<uint32_t>(planes, numel, values);
  join_planes_of<uint16_t>(planes, numel, values);
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
