// The XLA FFI handler of allreduce_q on CPU.
#ifndef CGX_XLA_FFI_ALLREDUCE_Q_H_
#define CGX_XLA_FFI_ALLREDUCE_Q_H_

#include "xla/ffi/api/ffi.h"

namespace cgx::xla {

XLA_FFI_DECLARE_HANDLER_SYMBOL(AllreduceQ);

}  // namespace cgx::xla

#endif  // CGX_XLA_FFI_ALLREDUCE_Q_H_
