// Converts a cgx status to the exception that PyTorch users expect.
//
// ValueError: an invalid value or name. TypeError: an unsupported dtype or layout.
// torch.distributed.DistBackendError: all failures among ranks, such as a mismatch, a deadline, a
// dead peer, a closed communicator, or MPI. Python has a class for each
// (cgx_ops/torch/backend/errors.py).
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <utility>

#include "cgx/cgx.h"

namespace cgx::torch_ops {

// A failure among ranks. It keeps its status.
class RankFailure : public c10::DistBackendError {
 public:
  RankFailure(cgx_status_t status, c10::SourceLocation location, std::string text)
      : c10::DistBackendError(location, std::move(text)), status(status) {}
  cgx_status_t status;
};

// Throws unless `status` is CGX_OK. Call it on the thread that got the status: it takes the text of
// that thread's last failure.
inline void check(cgx_status_t status) {
  if (status == CGX_OK) return;
  const std::string text = cgx_last_error();
  switch (status) {
    case CGX_INVALID_ARGUMENT:
    case CGX_NOT_FOUND:
      C10_THROW_ERROR(ValueError, text);
    case CGX_UNSUPPORTED:
      C10_THROW_ERROR(TypeError, text);
    case CGX_MISMATCH:
    case CGX_TIMEOUT:
    case CGX_PEER_FAILED:
    case CGX_CLOSED:
    case CGX_SYSTEM:
      throw RankFailure(status, {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
    default:
      C10_THROW_ERROR(Error, text);
  }
}

}  // namespace cgx::torch_ops
