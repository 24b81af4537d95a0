// Reduce kernels. Those to records are in another file, which compiles in parallel.
#include "kernel/cuda/aligned/kernels.cuh"

namespace cgx::device::cuda::aligned {

template <>
const void* kernel<Reduce>(Dtype dtype, const Variant& variant, bool noisy) {
  if (variant.bits == kExactBits) return exact_kernel<Reduce>(dtype);
  if (variant.encodes) return records_kernel(dtype, variant, noisy);
  return with_value(dtype, [&]<typename Value>(Value) {
    return with_values(variant, []<typename Format>(Format, auto... arguments) {
      return reinterpret_cast<const void*>(&reduce_aligned<Value, Format, arguments...>);
    });
  });
}

}  // namespace cgx::device::cuda::aligned
