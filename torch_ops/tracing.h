// The steps of all public operators before their collective: check whether a graph is being built,
// and draw a seed.
#pragma once

#include <ATen/core/Tensor.h>

#include "options.h"

namespace cgx::torch_ops {

// Has `hook` called before an operator becomes part of a graph; null: no longer.
void set_trace_hook(void (*hook)());

// Whether a graph is being built. Modes of a user (a profile, a flop count, opcheck) build none.
bool is_traced(at::TensorList xs, at::TensorList residuals = {});

// The same; a graph that is being built has the hook called.
bool notice_trace(at::TensorList xs, at::TensorList residuals = {});

// Whether a gradient is recorded.
bool require_grad(at::TensorList xs);

// The seed of a call on these tensors; none if its options need none.
Seed draw_if_needed(const Options& options, at::TensorList xs, at::TensorList residuals = {});

}  // namespace cgx::torch_ops
