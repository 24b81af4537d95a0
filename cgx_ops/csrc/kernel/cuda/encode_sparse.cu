// Encode kernels for sparse buckets.
#include "kernel/cuda/launching.cuh"

namespace cgx::device::cuda {

void launch_sparse(const Encode& encode, void* stream) { launch_of<SparseFormat>(encode, stream); }

void load_sparse_encode_kernels() { load_kernels_of<SparseFormat, Encode>(); }

}  // namespace cgx::device::cuda
