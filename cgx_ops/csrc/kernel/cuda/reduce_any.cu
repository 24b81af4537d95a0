// Reduce kernels for buckets of any format.
#include "kernel/cuda/launching.cuh"

namespace cgx::device::cuda {

void launch_any(const Reduce& reduce, int processors, void* stream) {
  launch_of<AnyFormat>(reduce, processors, stream);
}

void load_any_reduce_kernels() { load_kernels_of<AnyFormat, Reduce>(); }

}  // namespace cgx::device::cuda
