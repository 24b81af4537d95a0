// What torch's types and operators are called in the core, and the small arithmetic that all of
// this binding shares.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "cgx/call_seeds.h"
#include "cgx/cgx.h"

namespace cgx::torch_ops {

// The core's name of a dtype; none for those that it does not serve.
inline std::optional<cgx_dtype_t> core_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return CGX_FLOAT32;
    case at::kHalf:
      return CGX_FLOAT16;
    case at::kBFloat16:
      return CGX_BFLOAT16;
    default:
      return std::nullopt;
  }
}

// A seed under a name (of a group): the seed plus FNV-1a of the name.
inline int64_t named_seed(int64_t seed, std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return static_cast<int64_t>(static_cast<uint64_t>(seed) + hash);
}

// An operator by name, to be called through the dispatcher, so that tracers and modes see it.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace cgx::torch_ops
