// Reduce kernels that encode the sum.
#include "kernel/cuda/aligned/kernels.cuh"

namespace cgx::device::cuda::aligned {

const void* records_kernel(Dtype dtype, const Variant& variant, bool noisy) {
  return with_format(variant, [&]<typename Format>(Format, auto lanes) {
    return with_noise<Format>(noisy, [&](auto is_noisy) {
      // Without own values the dtype does not matter.
      if (!variant.own)
        return reinterpret_cast<const void*>(
            &reduce_aligned<Float32, Format, lanes, is_noisy, /*own=*/false, /*residual=*/false,
                            /*encodes=*/true>);
      return with_value(dtype, [&]<typename Value>(Value) {
        return with_flag(variant.residual, [&](auto has_residual) {
          return reinterpret_cast<const void*>(
              &reduce_aligned<Value, Format, lanes, is_noisy, /*own=*/true, has_residual,
                              /*encodes=*/true>);
        });
      });
    });
  });
}

}  // namespace cgx::device::cuda::aligned
