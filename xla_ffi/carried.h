// The XLA FFI handlers of psum_q with carrier="xla": the arithmetic between exchanges that XLA's
// own collectives make (cgx.h, section 5).
//
//   sra       Encode -> all-to-all -> Reduce -> all-gather -> Decode
//   one_shot  Encode -> all-gather -> Decode
//
// and where a process has several devices of the group, Sum before them and Round behind. They are
// pure functions of their operands: they know no communicator, no process and no peer, and wait for
// nothing.
//
// Messages are rows of equal length, as XLA's collectives want them: each ends in zeros if another
// is longer. Row r of an all-to-all is for rank r; a rank's own is all zeros.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace cgx::xla {

XLA_FFI_DECLARE_HANDLER_SYMBOL(CarriedSum);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CarriedRound);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CarriedEncode);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CarriedReduce);
XLA_FFI_DECLARE_HANDLER_SYMBOL(CarriedDecode);

}  // namespace cgx::xla
