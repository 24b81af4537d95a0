// The XLA FFI handlers, and their settings from Python.
#pragma once

#include <cstdint>
#include <map>

#include "xla/ffi/api/ffi.h"

namespace cgx::xla {

// Handlers of psum_q, psum_scatter_q, all_gather_q and all_to_all_q, on CPU and on CUDA:
// Instantiate creates a Site, Execute starts the collective or, on CUDA, enqueues it on the
// device's stream.
XLA_FFI_DECLARE_HANDLER_SYMBOL(CollectiveInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CollectiveExecute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaCollectiveInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaCollectiveExecute);

// Handlers of psum_q with carrier="xla": see carried.cc.
XLA_FFI_DECLARE_HANDLER_SYMBOL(CarriedSum);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CarriedRound);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CarriedRoundResidual);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CarriedEncode);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CarriedReduce);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CarriedDecode);

// Handlers of allreduce_q, on CPU and on CUDA.
XLA_FFI_DECLARE_HANDLER_SYMBOL(AllreduceQ);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaAllreduceQ);

// Sets the deadline, in seconds, of later collectives with several devices of this process.
// Collectives with one device per process have their communicator's deadline.
void SetLocalTimeout(double seconds);

// Sets JAX's ids of this process's GPUs, by CUDA's ordinals, before any handler runs.
void SetCudaDevices(std::map<int32_t, int64_t> ids);

}  // namespace cgx::xla
