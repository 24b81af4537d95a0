// General Reduce kernels for uniform buckets and uncompressed values.
#include "kernel/cuda/general.cuh"

namespace cgx::device::cuda {

template const void* general_kernel<Formats::kPlain, Reduce>(Dtype dtype, Takers takers);

}  // namespace cgx::device::cuda
