// Kernels of Reduce.
#include "kernel/cuda/launching.cuh"

namespace cgx::device::cuda {

void launch(const Reduce& reduce, void* stream) {
  launch_on(reduce, true, static_cast<cudaStream_t>(stream));
}

void load_reduce_kernels() { load_kernels_of<Reduce>(); }

}  // namespace cgx::device::cuda
