// Reduce kernels to records.
#include "kernel/cuda/aligned/kernels.cuh"

namespace cgx::device::cuda::aligned {

const void* records_kernel(Dtype dtype, const Variant& variant, bool noisy) {
  // Without own values the dtype does not matter.
  return with_value(variant.own ? dtype : Dtype::kFloat32, [&]<typename Value>(Value) {
    return with_records(
        variant, noisy,
        []<typename Format>(Format, auto lanes, auto is_noisy, auto own, auto residual,
                            auto encodes) {
          using Summed = std::conditional_t<own, Value, Float32>;
          return reinterpret_cast<const void*>(
              &reduce_aligned<Summed, Format, lanes, is_noisy, own, residual, encodes>);
        });
  });
}

}  // namespace cgx::device::cuda::aligned
