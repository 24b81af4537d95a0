// The statistic that predicts the quantization error of a tensor for all bits: for min-max buckets
// the sum of n * range^2, for other formats the sum of squares (docs/guides/planner.md). Buckets
// are measured as the encoder does, and added in order.
#pragma once

#include <cstdint>

#include "kernel/cpu/uniform-inl.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

// For one bucket. NaN if a value or the range is not finite.
template <typename Value>
double spread_of(const Stored<typename Value::Bits>* __restrict values, int64_t n) {
  const auto extent = static_cast<double>(extent_of<Value>(values, n).extent);
  return static_cast<double>(n) * (extent * extent);
}

template <typename Value>
double energy_of(const Stored<typename Value::Bits>* __restrict values, int64_t n) {
  const Measured<1> found = measure_squares<Value>(values, n);
  if (!is_finite(found.largest)) return static_cast<double>(kNan);
  const auto up = static_cast<double>(found.scale.up);
  return found.sums[0] * (up * up);
}

double measure(Dtype dtype, const void* from, const BucketRun& run) {
  double total = 0.0;
  with_value_type(dtype, [&](auto value) {
    using Value = decltype(value);
    const auto* values = static_cast<const Stored<typename Value::Bits>*>(from);
    const bool ranges = run.format == BucketFormat::kUniform;
    for (int64_t start = 0; start < run.numel; start += run.bucket_size) {
      const int64_t rest = run.numel - start;
      const int64_t n = rest < run.bucket_size ? rest : run.bucket_size;
      total += ranges ? spread_of<Value>(values + start, n) : energy_of<Value>(values + start, n);
    }
  });
  return total;
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
