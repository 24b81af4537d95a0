// General Encode kernels for block formats.
#include "kernel/cuda/general.cuh"

namespace cgx::device::cuda {

template const void* general_kernel<Formats::kBlocks, Encode>(Dtype dtype, Takers takers);

}  // namespace cgx::device::cuda
