// The XLA FFI handler of the gates of cgx_ops/jax/overlap.py. It does nothing: what matters is that
// XLA runs it when all of its operands are there, and that its results are in their buffers.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace cgx::xla {

XLA_FFI_DECLARE_HANDLER_SYMBOL(Gate);

}  // namespace cgx::xla
