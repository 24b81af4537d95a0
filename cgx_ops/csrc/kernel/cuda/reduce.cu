// Reduce kernels for uniform buckets and uncompressed values.
#include "kernel/cuda/launching.cuh"

namespace cgx::device::cuda {

void launch(const Reduce& reduce, void* stream) { launch_all(reduce, true, stream); }

void load_reduce_kernels() { load_kernels_of<UniformFormat, Reduce>(); }

}  // namespace cgx::device::cuda
