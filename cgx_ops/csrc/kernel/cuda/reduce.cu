// Reduce kernels for uniform buckets and uncompressed values.
#include "kernel/cuda/launching.cuh"

namespace cgx::device::cuda {

void launch(const Reduce& reduce, int processors, void* stream) {
  launch_all(reduce, true, processors, stream);
}

void load_reduce_kernels() { load_kernels_of<UniformFormat, Reduce>(); }

}  // namespace cgx::device::cuda
