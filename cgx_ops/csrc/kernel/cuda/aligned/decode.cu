// Decode kernels.
#include "kernel/cuda/aligned/kernels.cuh"

namespace cgx::device::cuda::aligned {

template <>
const void* kernel<Decode>(Dtype dtype, const Variant& variant, bool /*noisy*/) {
  if (variant.bits == kExactBits) return exact_kernel<Decode>(dtype);
  return with_value(dtype, [&]<typename Value>(Value) {
    return with_format(variant, [&]<typename Format>(Format, auto lanes) {
      return reinterpret_cast<const void*>(&decode_aligned<Value, Format, lanes>);
    });
  });
}

}  // namespace cgx::device::cuda::aligned
