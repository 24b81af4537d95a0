// Reduce kernels.
#include "kernel/cuda/aligned/kernels.cuh"

namespace cgx::device::cuda::aligned {

template <>
const void* kernel<Reduce>(Dtype dtype, const Variant& variant, bool noisy) {
  if (variant.bits == kExactBits) return exact_kernel<Reduce>(dtype);
  if (variant.encodes) return records_kernel(dtype, variant, noisy);
  return with_value(dtype, [&]<typename Value>(Value) {
    return with_format(variant, [&]<typename Format>(Format, auto lanes) {
      return with_flag(variant.own, [&](auto own) {
        return reinterpret_cast<const void*>(
            &reduce_aligned<Value, Format, lanes, /*noisy=*/false, own, /*residual=*/false,
                            /*encodes=*/false>);
      });
    });
  });
}

}  // namespace cgx::device::cuda::aligned
