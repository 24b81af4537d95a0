// The arguments of the public operators, except for the tensors, and their checks.
//
//   overridden()    the config of a call, from its arguments
//   Options         the config and all other arguments. pack() makes a text for inner operators
//   check()         rejects invalid calls before anything is drawn, allocated or sent. Kernels and
//                   Meta kernels share it, so that eager and compiled models raise the same errors
//   collective()    converts the options for the C API
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "cgx/call.h"
#include "cgx/cgx.h"

namespace cgx::torch_ops {

// An int64 scalar; nullopt if the config needs no seed.
using Seed = std::optional<at::Tensor>;

// The config as public operators take it: a text for cgx_config_parse, and the fields that keyword
// arguments override (cgx_config_override).
struct GivenConfig {
  std::string_view config;
  std::optional<int64_t> bits, bucket_size;
  std::optional<std::string_view> compressor, rounding;
  bool operator==(const GivenConfig&) const = default;
};
// Returns the same as one text of all fields, valid until this thread's next call. Throws
// ValueError.
std::string_view overridden(const GivenConfig& given, int32_t verb = CGX_ALLREDUCE);

// Returns the public operator of a cgx_verb_t, for errors.
const char* operator_name(int32_t verb);

struct Options {
  // `config` is a text for cgx_config_parse. Throws ValueError if it is invalid.
  Options(std::string_view op, int64_t depth, std::string_view config, std::string_view name,
          std::string_view group_name, std::string_view carrier = "native",
          int32_t verb = CGX_ALLREDUCE);

  int32_t verb;  // a cgx_verb_t
  std::string op;
  int64_t depth;  // 0: a forward call; n: the gradient of a call of depth n - 1
  std::shared_ptr<const std::string> config_text;
  cgx_config_t config;
  cgx_seed_use_t seed_use;  // derived from the config, as is `exact`
  bool exact;
  std::string name;
  std::string group_name;
  std::string carrier;

  // Returns the text that inner operators take, "op=sum depth=0 bits=4 ... name=": everything
  // except for the verb, the group and the carrier.
  std::string pack() const;
  // Throws ValueError if `call` is not a result of pack().
  static Options unpack(std::string_view call, std::string_view group_name,
                        std::string_view carrier = "native", int32_t verb = CGX_ALLREDUCE);

  // Throws ValueError (options) or TypeError (tensor). The text names the remedy.
  void check(const at::Tensor& x) const;
  // Throws NotImplementedError if torch's own collectives should send the messages.
  void check_native() const;

  bool needs_seed() const { return seed_use != CGX_SEED_UNUSED; }
  // Whether torch's own collectives send the messages.
  bool carried() const { return carrier == "c10d"; }

  // Returns the options of the gradient's collective: all_gather for reduce_scatter, and
  // reduce_scatter for all_gather. Throws NotImplementedError if the op has no gradient.
  Options gradient() const;

  // Returns the call without comm, seed, dtype, buffers and segments.
  CallBuilder collective() const;

  // Converts the options to one value that autograd can save and compare, and back.
  c10::IValue value() const;
  static Options of(const c10::IValue& value);
};

}  // namespace cgx::torch_ops
