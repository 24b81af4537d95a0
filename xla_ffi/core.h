// What XLA's types, errors, attributes and seeds are in the core, for all handlers.
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

inline int32_t GetInt32(const ffi::Dictionary& attributes, std::string_view name) {
  return static_cast<int32_t>(GetAttribute<int64_t>(attributes, name));
}

// A list of int64.
inline std::vector<int64_t> GetList(const ffi::Dictionary& attributes, std::string_view name) {
  const auto span = GetAttribute<ffi::Span<const int64_t>>(attributes, name);
  return {span.begin(), span.end()};
}

// How each leaf of a custom call travels (call_attributes of
// cgx_ops/jax/_src/collectives/calls.py). Leaves that have equal configs share one.
class LeafConfigs {
 public:
  // Throws StatusError if an attribute is missing or is no config.
  explicit LeafConfigs(const ffi::Dictionary& attributes)
      : config_of_(GetList(attributes, "config_of")) {
    std::string_view texts = GetAttribute<std::string_view>(attributes, "config");
    auto configs = std::make_shared<std::vector<cgx_config_t>>();
    while (!texts.empty()) {  // one a line
      const std::string text(texts.substr(0, texts.find('\n')));
      configs->push_back(config_of(text.c_str()));
      texts.remove_prefix(std::min(text.size() + 1, texts.size()));
    }
    configs_ = std::move(configs);
  }

  size_t size() const { return config_of_.size(); }
  const cgx_config_t& operator[](size_t leaf) const { return configs_->at(config_of_.at(leaf)); }
  std::shared_ptr<const void> held() const { return configs_; }  // they live as long as this

 private:
  std::shared_ptr<const std::vector<cgx_config_t>> configs_;
  std::vector<int64_t> config_of_;  // by leaf, its place among them
};

// A call without its values, in which segments may have these configs. That of the first leaf is
// the call's: what of it counts for the whole call is equal in all.
inline CallBuilder MakeCall(const Verb& verb, int32_t op, const LeafConfigs& configs,
                            std::string name = "") {
  CallBuilder call(std::move(name));
  call.fields.verb = verb.id;
  call.fields.op = op;
  call.fields.config = configs[0];
  call.own_held = configs.held();
  return call;
}

// What the attributes of a custom call say of its message, whoever reduces together
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
  std::string function;          // what users call it
  bool feedback;                 // leaves have residuals
  std::vector<int64_t> batches;  // by leaf, equal segments in the operand: the examples of a vmap
};

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
