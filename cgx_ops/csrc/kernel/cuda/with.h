// From run-time values to template arguments.
#pragma once

#include <type_traits>

#include "base/types.h"
#include "kernel/cuda/arithmetic.h"
#include "kernel/cuda/work.h"

namespace cgx::device::cuda {

// Returns use(Value{}) for the type that represents a dtype (arithmetic.h).
template <typename Use>
auto with_value(Dtype dtype, const Use& use) {
  if (dtype == Dtype::kFloat16) return use(Float16{});
  if (dtype == Dtype::kBfloat16) return use(Bfloat16{});
  return use(Float32{});
}

// Returns use(std::true_type{}) or use(std::false_type{}).
template <typename Use>
auto with_flag(bool flag, const Use& use) {
  return flag ? use(std::true_type{}) : use(std::false_type{});
}

template <int kNumber>
using Number = std::integral_constant<int, kNumber>;

}  // namespace cgx::device::cuda
