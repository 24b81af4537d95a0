// What the attributes of a custom call say of its message, whoever reduces together
// (message_attributes of cgx_ops/jax/primitive.py).
#pragma once

#include <cstdint>
#include <vector>

#include "cgx/cgx.h"
#include "core.h"
#include "xla/ffi/api/ffi.h"

namespace cgx::xla {

struct Signature {
  // Throws StatusError if an attribute is missing or has the wrong type.
  explicit Signature(const ffi::Dictionary& attributes)
      : configs(attributes),
        collective(GetSettings(attributes, configs)),
        feedback(GetAttribute<int64_t>(attributes, "feedback") != 0) {
    collective.verb = static_cast<int32_t>(GetAttribute<int64_t>(attributes, "verb"));
    batches = GetList(attributes, "batches");
  }

  LeafConfigs configs;
  cgx_collective_t collective;   // verb, op and config
  bool feedback;                 // leaves have residuals
  std::vector<int64_t> batches;  // by leaf, equal segments in the operand: the examples of a vmap
};

}  // namespace cgx::xla
