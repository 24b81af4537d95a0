// Decode kernels for buckets of any format.
#include "kernel/cuda/launching.cuh"

namespace cgx::device::cuda {

void launch_any(const Decode& decode, int processors, void* stream) {
  launch_of<AnyFormat>(decode, processors, stream);
}

void load_any_decode_kernels() { load_kernels_of<AnyFormat, Decode>(); }

}  // namespace cgx::device::cuda
