// The XLA FFI handlers of psum_q and its sisters on CUDA: Instantiate makes a Site, Execute puts
// the collective on the device's stream.
#pragma once

#include <cstdint>
#include <map>

#include "call.h"
#include "core.h"
#include "xla/ffi/api/ffi.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace cgx::xla {

XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaCollectiveInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaCollectiveExecute);

// Tells JAX's ids of this process's GPUs, by CUDA's ordinals, before any handler runs.
void SetCudaDevices(std::map<int32_t, int64_t> ids);

// Puts a message on a stream; its buffers and the seeds, by segment, are in the GPU's memory.
// Throws StatusError.
void EnqueueOn(CUstream_st* stream, Message& message, const U32Buffer& seeds, int32_t comm);

}  // namespace cgx::xla
