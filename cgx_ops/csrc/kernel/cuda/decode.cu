// Decode kernels for uniform buckets and uncompressed values.
#include "kernel/cuda/launching.cuh"

namespace cgx::device::cuda {

void launch(const Decode& decode, int processors, void* stream) {
  launch_all(decode, false, processors, stream);
}

void load_decode_kernels() { load_kernels_of<UniformFormat, Decode>(); }

}  // namespace cgx::device::cuda
