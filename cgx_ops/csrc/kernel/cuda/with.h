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

// Returns use(Number<bits>{}, Number<lanes>{}) for the bits of aligned kernels, and for the lanes
// of a bucket if it has the default size; otherwise 0.
template <typename Use>
auto with_codes(int bits, bool default_size, const Use& use) {
  const auto with_lanes = [&](auto constant_bits) {
    return default_size ? use(constant_bits, Number<kWarpLanes>{})
                        : use(constant_bits, Number<0>{});
  };
  if (bits == 2) return with_lanes(Number<2>{});
  if (bits == 4) return with_lanes(Number<4>{});
  return with_lanes(Number<8>{});
}

}  // namespace cgx::device::cuda
