// Decode kernels for sparse buckets.
#include "kernel/cuda/launching.cuh"

namespace cgx::device::cuda {

void launch_sparse(const Decode& decode, int processors, void* stream) {
  launch_of<SparseFormat>(decode, processors, stream);
}

void load_sparse_decode_kernels() { load_kernels_of<SparseFormat, Decode>(); }

}  // namespace cgx::device::cuda
