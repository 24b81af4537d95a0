// General Encode kernels for sparse buckets.
#include "kernel/cuda/general.cuh"

namespace cgx::device::cuda {

template const void* general_kernel<Formats::kSparse, Encode>(Dtype dtype, Takers takers);

}  // namespace cgx::device::cuda
