// The XLA FFI handlers of allreduce_q, on CPU and on CUDA.
#ifndef CGX_XLA_FFI_ALLREDUCE_Q_H_
#define CGX_XLA_FFI_ALLREDUCE_Q_H_

#include "xla/ffi/api/ffi.h"

namespace cgx::xla {

XLA_FFI_DECLARE_HANDLER_SYMBOL(AllreduceQ);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CudaAllreduceQ);

}  // namespace cgx::xla

#endif  // CGX_XLA_FFI_ALLREDUCE_Q_H_
