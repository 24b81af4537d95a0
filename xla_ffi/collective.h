// The XLA FFI handlers of psum_q and its sisters on CPU: Instantiate makes a Site, Execute starts
// the collective.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace cgx::xla {

XLA_FFI_DECLARE_HANDLER_SYMBOL(CollectiveInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CollectiveExecute);

// Sets the deadline, in seconds, of collectives that several devices of this process take part in,
// from here on. Collectives of one device per process have their communicator's deadline.
void SetLocalTimeout(double seconds);

}  // namespace cgx::xla
