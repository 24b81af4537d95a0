// Detects tracing and draws seeds, before the collective of a public operator.
#pragma once

#include <ATen/core/Tensor.h>

#include "options.h"

namespace cgx::torch_ops {

// Sets a function that is called before an operator becomes part of a graph; null removes it.
void set_trace_hook(void (*hook)());

// Whether a graph is being built. User modes (profilers, flop counters, opcheck) build none.
bool is_traced(at::TensorList xs, at::TensorList residuals = {});

// The same, but also calls the trace hook if a graph is being built.
bool notice_trace(at::TensorList xs, at::TensorList residuals = {});

// Whether a gradient is recorded.
bool require_grad(at::TensorList xs);

// Returns the seed of a call on these tensors, or nullopt if its options need none.
Seed draw_if_needed(const Options& options, at::TensorList xs, at::TensorList residuals = {});

}  // namespace cgx::torch_ops
