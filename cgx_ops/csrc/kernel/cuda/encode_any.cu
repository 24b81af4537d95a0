// General Encode kernels for buckets of any format.
#include "kernel/cuda/general.cuh"

namespace cgx::device::cuda {

template const void* general_kernel<Formats::kAny, Encode>(Dtype dtype, Takers takers);

}  // namespace cgx::device::cuda
