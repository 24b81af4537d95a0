// Encode kernels for buckets of any format.
#include "kernel/cuda/launching.cuh"

namespace cgx::device::cuda {

void launch_any(const Encode& encode, int processors, void* stream) {
  launch_of<AnyFormat>(encode, processors, stream);
}

void load_any_encode_kernels() { load_kernels_of<AnyFormat, Encode>(); }

}  // namespace cgx::device::cuda
