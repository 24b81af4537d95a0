// Conversion of XLA's types, errors, attributes and seeds to the core's, for all handlers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "cgx/call.h"
#include "cgx/cgx.h"
#include "cgx/verb.h"
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

// Returns the core's status of an exception. No exception may leave a handler: XLA would lose its
// type and origin, and threads of the core and of the pool would end the process.
inline cgx_status_t StatusOf(const std::exception& error) {
  if (const auto* known = dynamic_cast<const StatusError*>(&error)) return known->status;
  const bool short_of_something = dynamic_cast<const std::bad_alloc*>(&error) ||
                                  dynamic_cast<const std::system_error*>(&error);  // no thread
  return short_of_something ? CGX_SYSTEM : CGX_INTERNAL;
}

inline ffi::Error ToError(const std::exception& error, const std::string& where = "") {
  return ffi::Error(ToErrorCode(StatusOf(error)), where + error.what());
}

// Throws StatusError for types that the core does not support.
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

// Returns an attribute of a custom call. Throws StatusError if it is missing or has another type.
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

inline int32_t GetInt32(const ffi::Dictionary& attributes, std::string_view name) {
  return static_cast<int32_t>(GetAttribute<int64_t>(attributes, name));
}

// A list of int64.
inline std::vector<int64_t> GetList(const ffi::Dictionary& attributes, std::string_view name) {
  const auto span = GetAttribute<ffi::Span<const int64_t>>(attributes, name);
  return {span.begin(), span.end()};
}

// The config of each leaf of a custom call (call_attributes of
// cgx_ops/jax/_src/collectives/calls.py). Equal configs are stored once.
class LeafConfigs {
 public:
  // Throws StatusError if an attribute is missing or is not a config.
  explicit LeafConfigs(const ffi::Dictionary& attributes)
      : config_of_(GetList(attributes, "config_of")) {
    std::string_view texts = GetAttribute<std::string_view>(attributes, "config");
    auto configs = std::make_shared<std::vector<cgx_config_t>>();
    while (!texts.empty()) {  // one per line
      const std::string text(texts.substr(0, texts.find('\n')));
      configs->push_back(config_of(text.c_str()));
      texts.remove_prefix(std::min(text.size() + 1, texts.size()));
    }
    configs_ = std::move(configs);
  }

  size_t size() const { return config_of_.size(); }
  const cgx_config_t& operator[](size_t leaf) const { return configs_->at(config_of_.at(leaf)); }
  std::shared_ptr<const void> held() const { return configs_; }  // keeps the configs alive

 private:
  std::shared_ptr<const std::vector<cgx_config_t>> configs_;
  std::vector<int64_t> config_of_;  // by leaf, the index of its config
};

// Returns a call without values, whose segments may have these configs. The call's own config is
// that of the first leaf: fields that apply to the whole call are equal in all leaves.
inline CallBuilder MakeCall(const Verb& verb, int32_t op, const LeafConfigs& configs,
                            std::string name = "") {
  CallBuilder call(std::move(name));
  call.fields.verb = verb.id;
  call.fields.op = op;
  call.fields.config = configs[0];
  call.own_held = configs.held();
  return call;
}

// The attributes of a custom call that describe its message, for meshes and communicators
// (message_attributes of cgx_ops/jax/_src/collectives/primitive.py).
struct Signature {
  // Throws StatusError if an attribute is missing or has the wrong type.
  explicit Signature(const ffi::Dictionary& attributes)
      : configs(attributes),
        verb(verb_of(GetInt32(attributes, "verb"))),
        op(GetInt32(attributes, "op")),
        function(GetAttribute<std::string_view>(attributes, "function")),
        feedback(GetAttribute<int64_t>(attributes, "feedback") != 0),
        batches(GetList(attributes, "batches")) {}

  LeafConfigs configs;
  const Verb& verb;
  int32_t op;
  std::string function;          // the public name
  bool feedback;                 // whether leaves have residuals
  std::vector<int64_t> batches;  // by leaf, the number of equal segments: examples of a vmap
};

// Returns the buffer at `index` of a custom call's operands or results.
template <typename Buffer, typename Buffers>
auto GetBuffer(const Buffers& buffers, size_t index) {
  const auto buffer = buffers.template get<Buffer>(index);
  if (!buffer) {
    throw StatusError(
        CGX_INTERNAL,
        "the custom call's buffers do not match this cgx_ops release: " + buffer.error().message());
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
