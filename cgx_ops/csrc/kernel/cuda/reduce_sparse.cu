// Reduce kernels for sparse buckets.
#include "kernel/cuda/launching.cuh"

namespace cgx::device::cuda {

void launch_sparse(const Reduce& reduce, int processors, void* stream) {
  launch_of<SparseFormat>(reduce, processors, stream);
}

void load_sparse_reduce_kernels() { load_kernels_of<SparseFormat, Reduce>(); }

}  // namespace cgx::device::cuda
