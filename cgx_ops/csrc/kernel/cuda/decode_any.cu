// General Decode kernels for buckets of any format.
#include "kernel/cuda/general.cuh"

namespace cgx::device::cuda {

template const void* general_kernel<Formats::kAny, Decode>(Dtype dtype, Takers takers);

}  // namespace cgx::device::cuda
