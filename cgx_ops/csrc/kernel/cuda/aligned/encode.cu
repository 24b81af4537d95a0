// Encode kernels.
#include "kernel/cuda/aligned/kernels.cuh"

namespace cgx::device::cuda::aligned {

template <>
const void* kernel<Encode>(Dtype dtype, const Variant& variant, bool noisy) {
  if (variant.bits == kExactBits) return exact_kernel<Encode>(dtype);
  return with_value(dtype, [&]<typename Value>(Value) {
    return with_format(variant, [&]<typename Format>(Format, auto lanes) {
      return with_noise<Format>(noisy, [&](auto is_noisy) {
        return with_flag(variant.residual, [&](auto has_residual) {
          return reinterpret_cast<const void*>(
              &encode_aligned<Value, Format, lanes, is_noisy, has_residual>);
        });
      });
    });
  });
}

}  // namespace cgx::device::cuda::aligned
