// Uncompressed values: conversion, sums, min, max, product, division. One pass each.
#pragma once

#include <cstdint>

#include "kernel/cpu/values-inl.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

template <typename From, typename To>
void convert_as(const void* from_bytes, void* to_bytes, int64_t numel) {
  const auto* __restrict from = static_cast<const Stored<typename From::Bits>*>(from_bytes);
  auto* __restrict to = static_cast<Stored<typename To::Bits>*>(to_bytes);
  for (int64_t i = 0; i < numel; ++i) to[i].value = To::round(From::widen(from[i].value));
}

void convert(Dtype from_type, const void* from, Dtype to_type, void* to, int64_t numel) {
  if (from_type == to_type) {
    const size_t width = from_type == Dtype::kFloat32 ? 4 : 2;
    if (from != to && numel > 0) __builtin_memcpy(to, from, width * static_cast<size_t>(numel));
    return;
  }
  with_value_type(from_type, [&](auto source) {
    with_value_type(to_type, [&](auto target) {
      convert_as<decltype(source), decltype(target)>(from, to, numel);
    });
  });
}

// `errors` may be the values.
template <typename To>
void convert_keeping_as(const float* from_floats, void* to_bytes, float* error_floats,
                        int64_t numel) {
  const auto* from = reinterpret_cast<const Stored<float>*>(from_floats);
  auto* __restrict to = static_cast<Stored<typename To::Bits>*>(to_bytes);
  auto* errors = reinterpret_cast<Stored<float>*>(error_floats);
#pragma GCC ivdep
  for (int64_t i = 0; i < numel; ++i) {
    const float value = from[i].value;
    const typename To::Bits rounded = To::round(value);
    to[i].value = rounded;
    errors[i].value = finite_or_zero(value - To::widen(rounded));
  }
}

void convert_keeping(const float* from, Dtype to_type, void* to, float* errors, int64_t numel) {
  with_value_type(
      to_type, [&](auto target) { convert_keeping_as<decltype(target)>(from, to, errors, numel); });
}

// `base` and `sum` are equal or do not overlap, so there is no __restrict between them.
template <typename Value>
void add_as(const void* bytes, const float* base, float* into, int64_t numel) {
  const auto* __restrict values = static_cast<const Stored<typename Value::Bits>*>(bytes);
  const auto* from = reinterpret_cast<const Stored<float>*>(base);
  auto* sum = reinterpret_cast<Stored<float>*>(into);
#pragma GCC ivdep
  for (int64_t i = 0; i < numel; ++i)
    sum[i].value = with_one_nan(from[i].value + Value::widen(values[i].value));
}

void add(Dtype dtype, const void* values, const float* base, float* sum, int64_t numel) {
  with_value_type(dtype, [&](auto value) { add_as<decltype(value)>(values, base, sum, numel); });
}

void add_zero(const float* base, float* into, int64_t numel) {
  const auto* from = reinterpret_cast<const Stored<float>*>(base);
  auto* sum = reinterpret_cast<Stored<float>*>(into);
#pragma GCC ivdep
  for (int64_t i = 0; i < numel; ++i) sum[i].value = with_one_nan(from[i].value + 0.0f);
}

// In fp32 the sum may be one of the summands.
template <typename Value>
void add_two_as(const void* first, const void* second, float* into, int64_t numel) {
  const auto* a = static_cast<const Stored<typename Value::Bits>*>(first);
  const auto* b = static_cast<const Stored<typename Value::Bits>*>(second);
  auto* sum = reinterpret_cast<Stored<float>*>(into);
#pragma GCC ivdep
  for (int64_t i = 0; i < numel; ++i)
    sum[i].value = with_one_nan(Value::widen(a[i].value) + Value::widen(b[i].value));
}

void add_two(Dtype dtype, const void* a, const void* b, float* sum, int64_t numel) {
  with_value_type(dtype, [&](auto value) { add_two_as<decltype(value)>(a, b, sum, numel); });
}

// Compares order keys, so that -0 < +0 on all processors.
template <bool kMin>
[[gnu::always_inline]] inline float extreme(float a, float b) {
  const int32_t key_a = order_key(__builtin_bit_cast(int32_t, a));
  const int32_t key_b = order_key(__builtin_bit_cast(int32_t, b));
  const int32_t key = kMin == (key_a < key_b) ? key_a : key_b;
  const bool nan =
      is_nan(__builtin_bit_cast(uint32_t, a)) | is_nan(__builtin_bit_cast(uint32_t, b));
  const uint32_t bits = static_cast<uint32_t>(order_key(key));
  return __builtin_bit_cast(float, nan ? kFloat32Nan : bits);
}

template <typename Combine>
[[gnu::always_inline]] inline void combine_by(const Combine& op, const float* from, float* to,
                                              int64_t numel) {
  const auto* __restrict values = reinterpret_cast<const Stored<float>*>(from);
  auto* __restrict into = reinterpret_cast<Stored<float>*>(to);
  for (int64_t i = 0; i < numel; ++i) into[i].value = op(into[i].value, values[i].value);
}

void combine(Op op, const float* values, float* into, int64_t numel) {
  switch (op) {
    case Op::kMin:
      return combine_by([](float a, float b) { return extreme<true>(a, b); }, values, into, numel);
    case Op::kMax:
      return combine_by([](float a, float b) { return extreme<false>(a, b); }, values, into, numel);
    case Op::kProduct:
      return combine_by([](float a, float b) { return with_one_nan(a * b); }, values, into, numel);
    case Op::kSum:
    case Op::kAvg:
      return combine_by([](float a, float b) { return with_one_nan(a + b); }, values, into, numel);
  }
}

void divide(float* values, float divisor, int64_t numel) {
  auto* to = reinterpret_cast<Stored<float>*>(values);
  for (int64_t i = 0; i < numel; ++i) to[i].value = with_one_nan(to[i].value / divisor);
}

void subtract(const float* from, const float* decoded_from, float* into, int64_t numel) {
  const auto* values = reinterpret_cast<const Stored<float>*>(from);
  const auto* __restrict decoded = reinterpret_cast<const Stored<float>*>(decoded_from);
  auto* difference = reinterpret_cast<Stored<float>*>(into);
#pragma GCC ivdep
  for (int64_t i = 0; i < numel; ++i)
    difference[i].value = finite_or_zero(values[i].value - decoded[i].value);
}

template <typename Value>
void scale_as(const float* from, float factor, void* into, int64_t numel) {
  const auto* values = reinterpret_cast<const Stored<float>*>(from);
  auto* scaled = static_cast<Stored<typename Value::Bits>*>(into);
#pragma GCC ivdep
  for (int64_t i = 0; i < numel; ++i)
    scaled[i].value = Value::round(kept_in_residual<Value>(values[i].value * factor));
}

void scale(const float* values, float factor, Dtype dtype, void* scaled, int64_t numel) {
  with_value_type(dtype,
                  [&](auto value) { scale_as<decltype(value)>(values, factor, scaled, numel); });
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
