// The kernels as addresses, which kernels.cu launches and loads.
#pragma once

#include <type_traits>

#include "base/types.h"
#include "kernel/cuda/aligned/pieces.h"
#include "kernel/cuda/work.h"

namespace cgx::device::cuda {

// A general kernel. Each set of formats and type of launch has a separate file, so that they
// compile in parallel.
template <Formats kFormats, typename Launch>
const void* general_kernel(Dtype dtype, Takers takers);

const void* signals_kernel();

// Whether a launch rounds stochastically.
template <typename Launch>
bool is_noisy(const Launch& launch) {
  if constexpr (std::is_same_v<Launch, Decode>)
    return false;
  else
    return launch.rounding == RoundingMode::kStochastic;
}

namespace aligned {

// A kernel of aligned/, which is noisy if it rounds stochastically.
template <typename Launch>
const void* kernel(Dtype dtype, const Variant& variant, bool noisy);
template <>
const void* kernel<Encode>(Dtype dtype, const Variant& variant, bool noisy);
template <>
const void* kernel<Reduce>(Dtype dtype, const Variant& variant, bool noisy);
template <>
const void* kernel<Decode>(Dtype dtype, const Variant& variant, bool noisy);

// Calls visit(variant) for every variant that there may be.
template <typename Visit>
void for_variants(const Visit& visit) {
  const auto visit_all = [&](BucketFormat format, uint8_t bits, bool default_size) {
    for (const bool own : {false, true})
      for (const bool residual : {false, true})
        for (const bool encodes : {false, true})
          visit(Variant{format, bits, default_size, own, residual, encodes});
  };
  for (const uint8_t bits : {2, 4, 8, kExactBits})
    for (const bool default_size : {false, true})
      visit_all(BucketFormat::kUniform, bits, default_size);
  for (const uint8_t bits : {2, 3, 4})
    visit_all(BucketFormat::kLevels, bits, /*default_size=*/true);
}

}  // namespace aligned
}  // namespace cgx::device::cuda
