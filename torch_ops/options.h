// What a caller of quantized_allreduce may say besides the tensor, and the checks of both.
//
//   0. overridden(): the config of a call, from its arguments
//   1. Options: how values travel and what else a call has; packed into one text, which operators
//      hand on
//   2. check(): refuses what cannot work, before anything is drawn, allocated or sent; the kernels
//      and the tracing (Meta) kernels share it, so that a model fails alike compiled and not
//   3. collective(): the same as cgx.h wants it
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

// An int64 scalar; none where nothing is drawn.
using Seed = std::optional<at::Tensor>;

// How values travel, as public operators take it: a config, a text of cgx_config_parse, and the
// fields that keywords override (cgx_config_override).
struct GivenConfig {
  std::string_view config;
  std::optional<int64_t> bits, bucket_size;
  std::optional<std::string_view> compressor, rounding;
  bool operator==(const GivenConfig&) const = default;
};
// The same as one text of all fields, valid until this thread's next call. Throws ValueError.
std::string_view overridden(const GivenConfig& given, int32_t verb = CGX_ALLREDUCE);

// The public operator of a cgx_verb_t, for errors.
const char* operator_name(int32_t verb);

struct Options {
  // `config` is a text of cgx_config_parse. Throws ValueError for one that makes no sense.
  Options(std::string_view op, int64_t depth, std::string_view config, std::string_view name,
          std::string_view group_name, std::string_view carrier = "native",
          int32_t verb = CGX_ALLREDUCE);

  int32_t verb;  // a cgx_verb_t
  std::string op;
  int64_t depth;  // 0: a forward call, n: the gradient of one of depth n - 1
  std::shared_ptr<const std::string> config_text;
  cgx_config_t config;
  cgx_seed_use_t seed_use;  // what the config makes of a seed
  std::string name;
  std::string group_name;
  std::string carrier;

  // The text that operators under the public ones take, "op=sum depth=0 bits=4 ... name=": all but
  // the verb, the group and the carrier.
  std::string pack() const;
  // Throws ValueError for what pack() does not write.
  static Options unpack(std::string_view call, std::string_view group_name,
                        std::string_view carrier = "native", int32_t verb = CGX_ALLREDUCE);

  // Throws ValueError (options) or TypeError (tensor), naming the remedy.
  void check(const at::Tensor& x) const;

  bool needs_seed() const { return seed_use != CGX_SEED_UNUSED; }
  // Whether torch's own collectives move the bytes.
  bool carried() const { return carrier == "c10d"; }

  // The call that is the gradient of one with these options: of a reduce_scatter an all_gather, of
  // an all_gather a reduce_scatter. Throws NotImplementedError for an op without one.
  Options gradient() const;

  // All but comm, seed, dtype, buffers and segments.
  CallBuilder collective() const;

  // The whole as one value that autograd can keep and compare.
  c10::IValue value() const;
  static Options of(const c10::IValue& value);
};

}  // namespace cgx::torch_ops
