// Encode kernels.
#include "kernel/cuda/aligned/kernels.cuh"

namespace cgx::device::cuda::aligned {

template <>
const void* kernel<Encode>(Dtype dtype, const Variant& variant, bool noisy) {
  if (variant.bits == kExactBits) return exact_kernel<Encode>(dtype);
  return with_value(dtype, [&]<typename Value>(Value) {
    return with_encode(variant, noisy,
                       []<typename Format>(Format, auto lanes, auto is_noisy, auto residual) {
                         return reinterpret_cast<const void*>(
                             &encode_aligned<Value, Format, lanes, is_noisy, residual>);
                       });
  });
}

}  // namespace cgx::device::cuda::aligned
