// What XLA's types, errors, attributes and seeds are in the core, for all handlers.
#ifndef CGX_XLA_FFI_CORE_H_
#define CGX_XLA_FFI_CORE_H_

#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

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

// What a failure is to the core. No exception leaves a handler, whatever its type: XLA would lose
// its kind and where it was, and the threads of the core and of the pool end the process.
inline cgx_status_t StatusOf(const std::exception& error) {
  if (const auto* known = dynamic_cast<const StatusError*>(&error)) return known->status;
  const bool short_of_something = dynamic_cast<const std::bad_alloc*>(&error) ||
                                  dynamic_cast<const std::system_error*>(&error);  // no thread
  return short_of_something ? CGX_SYSTEM : CGX_INTERNAL;
}

inline ffi::Error ToError(const std::exception& error, const std::string& where = "") {
  return ffi::Error(ToErrorCode(StatusOf(error)), where + error.what());
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

// Of a custom call. Throws StatusError if it is missing or has another type.
template <typename T>
T GetAttribute(const ffi::Dictionary& attributes, std::string_view name) {
  ffi::ErrorOr<T> value = attributes.get<T>(name);
  if (!value) {
    throw StatusError(CGX_INTERNAL, "the custom call has no attribute '" + std::string(name) +
                                        "' of the right type: " + value.error().message() +
                                        ". Was it lowered by another version of cgx_ops?");
  }
  return *value;
}

// A list of int64.
inline std::vector<int64_t> GetList(const ffi::Dictionary& attributes, std::string_view name) {
  const auto span = GetAttribute<ffi::Span<const int64_t>>(attributes, name);
  return {span.begin(), span.end()};
}

// What all custom calls have: an op, and how values travel (call_attributes of
// cgx_ops/jax/_calls.py).
inline cgx_collective_t GetSettings(const ffi::Dictionary& attributes) {
  auto collective = make<cgx_collective_t>();
  collective.op = static_cast<int32_t>(GetAttribute<int64_t>(attributes, "op"));
  const std::string config(GetAttribute<std::string_view>(attributes, "config"));
  collective.config = config_of(config.c_str());
  return collective;
}

// The buffer at `index` of a custom call's operands or results.
template <typename Buffer, typename Buffers>
auto GetBuffer(const Buffers& buffers, size_t index) {
  const auto buffer = buffers.template get<Buffer>(index);
  if (!buffer) {
    throw StatusError(CGX_INTERNAL, "the custom call's buffers are not those of this cgx_ops: " +
                                        buffer.error().message());
  }
  return *buffer;
}

using U32Buffer = ffi::Buffer<ffi::U32>;

// Seeds of segments: rows (low half, high half), each a little-endian int64.
inline std::vector<int64_t> ReadSeeds(const U32Buffer& rows) {
  std::vector<int64_t> seeds(rows.element_count() / 2);
  for (size_t row = 0; row < seeds.size(); ++row) {
    const uint64_t low = rows.typed_data()[2 * row], high = rows.typed_data()[2 * row + 1];
    seeds[row] = static_cast<int64_t>(low | high << 32);
  }
  return seeds;
}

}  // namespace cgx::xla

#endif  // CGX_XLA_FFI_CORE_H_
