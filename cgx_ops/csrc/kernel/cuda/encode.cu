// Encode kernels for uniform buckets and uncompressed values.
#include "kernel/cuda/launching.cuh"

namespace cgx::device::cuda {

void launch(const Encode& encode, int processors, void* stream) {
  launch_all(encode, false, processors, stream);
}

void load_encode_kernels() { load_kernels_of<UniformFormat, Encode>(); }

}  // namespace cgx::device::cuda
