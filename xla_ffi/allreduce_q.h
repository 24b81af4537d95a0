// The XLA FFI handlers of allreduce_q, on CPU and on CUDA.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace cgx::xla {

XLA_FFI_DECLARE_HANDLER_SYMBOL(AllreduceQ);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaAllreduceQ);

}  // namespace cgx::xla
