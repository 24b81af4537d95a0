// The XLA FFI handlers of psum_q on CPU: Instantiate makes a Site, Execute starts the collective.
#ifndef CGX_XLA_FFI_PSUM_Q_H_
#define CGX_XLA_FFI_PSUM_Q_H_

#include "xla/ffi/api/ffi.h"

namespace cgx::xla {

XLA_FFI_DECLARE_HANDLER_SYMBOL(PsumQInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(PsumQExecute);

// Sets the deadline of collectives among devices of this process that start from here on; <= 0: the
// library's default. Collectives among processes have their communicator's deadline.
void SetLocalTimeout(double seconds);

}  // namespace cgx::xla

#endif  // CGX_XLA_FFI_PSUM_Q_H_
