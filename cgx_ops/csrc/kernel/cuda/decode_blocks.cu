// General Decode kernels for block formats.
#include "kernel/cuda/general.cuh"

namespace cgx::device::cuda {

template const void* general_kernel<Formats::kBlocks, Decode>(Dtype dtype, Takers takers);

}  // namespace cgx::device::cuda
