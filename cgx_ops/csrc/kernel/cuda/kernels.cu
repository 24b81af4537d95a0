// Loads all kernels.
#include "kernel/cuda/launching.cuh"

namespace cgx::device::cuda {

void load_kernels() {
  load_encode_kernels();
  load_reduce_kernels();
  load_decode_kernels();
  load_any_encode_kernels();
  load_any_reduce_kernels();
  load_any_decode_kernels();
  load_sparse_encode_kernels();
  load_sparse_reduce_kernels();
  load_sparse_decode_kernels();
  load_signals_kernel();
}

}  // namespace cgx::device::cuda
