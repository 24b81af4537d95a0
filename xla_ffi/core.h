// What XLA's types and errors are called in the core, for all handlers.
#ifndef CGX_XLA_FFI_CORE_H_
#define CGX_XLA_FFI_CORE_H_

#include "cgx/cgx.h"
#include "xla/ffi/api/ffi.h"

namespace cgx::xla {

namespace ffi = ::xla::ffi;

inline ffi::ErrorCode ToErrorCode(cgx_status_t status) {
  switch (status) {
    case CGX_OK:
      return ffi::ErrorCode::kOk;
    case CGX_INVALID_ARGUMENT:
      return ffi::ErrorCode::kInvalidArgument;
    case CGX_UNSUPPORTED:
      return ffi::ErrorCode::kUnimplemented;
    case CGX_NOT_FOUND:
      return ffi::ErrorCode::kNotFound;
    case CGX_MISMATCH:
      return ffi::ErrorCode::kFailedPrecondition;
    case CGX_TIMEOUT:
      return ffi::ErrorCode::kDeadlineExceeded;
    case CGX_PEER_FAILED:
      return ffi::ErrorCode::kUnavailable;
    case CGX_CLOSED:
      return ffi::ErrorCode::kAborted;
    case CGX_SYSTEM:
    case CGX_INTERNAL:
      break;
  }
  return ffi::ErrorCode::kInternal;
}

// Throws StatusError for types that the core does not serve.
inline cgx_dtype_t ToDtype(ffi::DataType type) {
  switch (type) {
    case ffi::F32:
      return CGX_FLOAT32;
    case ffi::F16:
      return CGX_FLOAT16;
    case ffi::BF16:
      return CGX_BFLOAT16;
    default:
      throw StatusError(CGX_UNSUPPORTED, "only float32, float16 and bfloat16 can be compressed");
  }
}

inline int64_t SizeOf(int32_t dtype) { return dtype == CGX_FLOAT32 ? 4 : 2; }

}  // namespace cgx::xla

#endif  // CGX_XLA_FFI_CORE_H_
