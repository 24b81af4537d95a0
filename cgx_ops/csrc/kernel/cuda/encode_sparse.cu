// Encode kernels for sparse buckets.
#include "kernel/cuda/launching.cuh"

namespace cgx::device::cuda {

void launch_sparse(const Encode& encode, int processors, void* stream) {
  launch_of<SparseFormat>(encode, processors, stream);
}

void load_sparse_encode_kernels() { load_kernels_of<SparseFormat, Encode>(); }

}  // namespace cgx::device::cuda
