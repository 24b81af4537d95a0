// Kernels of Decode.
#include "kernel/cuda/launching.cuh"

namespace cgx::device::cuda {

void launch(const Decode& decode, void* stream) {
  launch_on(decode, false, static_cast<cudaStream_t>(stream));
}

void load_decode_kernels() { load_kernels_of<Decode>(); }

}  // namespace cgx::device::cuda
