// Kernels of Encode.
#include "kernel/cuda/launching.cuh"

namespace cgx::device::cuda {

void launch(const Encode& encode, void* stream) {
  launch_on(encode, false, static_cast<cudaStream_t>(stream));
}

void load_encode_kernels() { load_kernels_of<Encode>(); }

}  // namespace cgx::device::cuda
