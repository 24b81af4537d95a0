// Conversions from torch's types to the core's, and helpers that all files of this binding use.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "cgx/call_seeds.h"
#include "cgx/cgx.h"

namespace cgx::torch_ops {

// Returns the core's dtype, or nullopt if the core does not support it.
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

// Whether the core supports the tensor on the CPU.
inline bool served_on_cpu(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_cpu() && core_dtype(tensor.scalar_type());
}

// Returns a seed that depends on a name: the seed plus FNV-1a of the name.
inline int64_t named_seed(int64_t seed, std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return static_cast<int64_t>(static_cast<uint64_t>(seed) + hash);
}

// Finds an operator by name. Call it through the dispatcher, so that tracers and modes see it.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace cgx::torch_ops
