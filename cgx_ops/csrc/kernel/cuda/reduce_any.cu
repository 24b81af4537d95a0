// General Reduce kernels for buckets of any format.
#include "kernel/cuda/general.cuh"

namespace cgx::device::cuda {

template const void* general_kernel<Formats::kAny, Reduce>(Dtype dtype, Takers takers);

}  // namespace cgx::device::cuda
