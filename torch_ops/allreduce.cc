// Graphs get two operators (start and wait) instead of one. Inductor may drop, merge or reorder a
// plain functional operator, and then ranks would deadlock. It keeps the order of starts that
// _c10d_functional.wait_tensor waits for (docs/explanation/architecture.md). Eager calls use one
// blocking operator, which is one entry in a profile and needs no registration.
//
//   1. the parts, called through the dispatcher, so that tracers and modes see them
//   2. AllReduce: the differentiable operator
//   3. the public operators
#include "allreduce.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "carried.h"
#include "coalesced.h"
#include "core.h"
#include "cuda.h"
#include "kernels.h"
#include "options.h"
#include "status.h"
#include "tracing.h"

namespace cgx::torch_ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ---- 1. the parts ---------------------------------------------------------------------------

// For one tensor or a list, with or without residuals.
variable_list all_reduce_native(at::TensorList xs, at::TensorList residuals, const Seed& seed,
                                const Options& o) {
  static const auto blocking =
      find_operator<decltype(all_reduce_kernel)>("cgx::quantized_all_reduce");
  static const auto start =
      find_operator<decltype(start_kernel)>("cgx::quantized_all_reduce_start");
  static const auto blocking_list =
      find_operator<decltype(all_reduce_coalesced_kernel)>("cgx::quantized_all_reduce_coalesced");
  static const auto start_list =
      find_operator<decltype(start_coalesced_kernel)>("cgx::quantized_all_reduce_coalesced_start");
  static const auto wait =
      find_operator<at::Tensor(const at::Tensor&)>("_c10d_functional::wait_tensor");

  const std::string packed = o.pack();
  const auto call = [&](const auto& one, const auto& list) -> variable_list {
    if (xs.size() == 1 && residuals.empty()) return {one.call(xs[0], seed, packed, o.group_name)};
    return list.call(xs, residuals, seed, packed, o.group_name);
  };
  if (!is_traced(xs, residuals)) return call(blocking, blocking_list);
  variable_list results = call(start, start_list);
  for (at::Tensor& result : results) result = wait.call(result);
  return results;
}

// Returns the sums or averages, then the new residuals.
variable_list all_reduce(at::TensorList xs, at::TensorList residuals, const Seed& seed,
                         const Options& options) {
  notice_trace(xs, residuals);
  return options.carried() ? all_reduce_carried(xs, residuals, seed, options)
                           : all_reduce_native(xs, residuals, seed, options);
}

// ---- 2. the differentiable operator ---------------------------------------------------------

// Every rank's output is the same sum (or mean) of all inputs. So the gradient of an input is the
// sum (or mean) of all ranks' output gradients: the same collective, quantized in the same way. A
// residual is added to its input, so both have the same gradient. New residuals have none.
class AllReduce : public torch::autograd::Function<AllReduce> {
 public:
  static constexpr bool is_traceable = true;  // backward has no state that tracing would miss

  // New residuals are returned in *new_residuals. As results they would have to be marked as not
  // differentiable, which compiled autograd does not support.
  static variable_list forward(AutogradContext* context, at::TensorList xs,
                               at::TensorList residuals, const Seed& seed, const Options& options,
                               variable_list* new_residuals) {
    context->saved_data["gradient"] = options.gradient().value();
    context->saved_data["has_residuals"] = !residuals.empty();
    context->save_for_backward({seed.value_or(at::Tensor())});
    variable_list results = all_reduce(xs, residuals, seed, options);
    new_residuals->assign(results.begin() + xs.size(), results.end());
    results.resize(xs.size());
    return results;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Options options = Options::of(context->saved_data["gradient"]);
    const at::Tensor seed = context->get_saved_variables()[0];
    variable_list results =
        reduce(gradients, {}, seed.defined() ? Seed(seed) : std::nullopt, options);
    if (context->saved_data["has_residuals"].toBool()) {
      const variable_list again = results;
      results.insert(results.end(), again.begin(), again.end());
    }
    results.resize(results.size() + 3);  // undefined gradients of seed, options and new_residuals
    return results;
  }

  static variable_list reduce(at::TensorList xs, at::TensorList residuals, const Seed& seed,
                              const Options& options) {
    if (!require_grad(xs) && !require_grad(residuals))
      return all_reduce(xs, residuals, seed, options);
    variable_list new_residuals, results = apply(xs, residuals, seed, options, &new_residuals);
    results.insert(results.end(), new_residuals.begin(), new_residuals.end());
    return results;
  }
};

}  // namespace

// ---- 3. the public operators ---------------------------------------------------------------

at::Tensor quantized_allreduce(const at::Tensor& x, CGX_PUBLIC_PARAMETERS) {
  const Options options(op, CGX_GIVEN_OPTIONS(CGX_ALLREDUCE));
  options.check(x);
  return AllReduce::reduce(x, {}, draw_if_needed(options, x), options)[0];
}

void quantized_allreduce_(at::Tensor& x, CGX_PUBLIC_PARAMETERS) {
  const Options options(op, CGX_GIVEN_OPTIONS(CGX_ALLREDUCE));
  options.check(x);
  const bool differentiable = require_grad({x});
  if (differentiable && x.is_leaf()) {
    C10_THROW_ERROR(ValueError,
                    "cgx::quantized_allreduce_: x is a leaf that requires grad, so it cannot be "
                    "changed in place; call it under torch.no_grad() or on x.grad");
  }
  at::assert_no_internal_overlap(x);
  const Seed seed = draw_if_needed(options, {x});
  if (differentiable || options.carried() || is_traced({at::Tensor(x)}) || x.is_meta() ||
      c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    x.copy_(AllReduce::reduce({x}, {}, seed, options)[0]);
    return;
  }
  const at::Tensor buffer = x.resolve_neg().contiguous();  // materializes a lazy negation
  run({.input = buffer, .output = buffer}, {buffer.numel()}, seed, options);
  if (!buffer.is_same(x)) {
    x.copy_(buffer);
  } else if (!x.is_inference()) {
    x.unsafeGetTensorImpl()->bump_version();
  }
}

std::vector<at::Tensor> quantized_allreduce_coalesced(at::TensorList xs, CGX_PUBLIC_PARAMETERS) {
  const Options options(op, CGX_GIVEN_OPTIONS(CGX_ALLREDUCE));
  check_list(xs, {}, options);  // before drawing a seed
  if (xs.empty()) return {};
  return AllReduce::reduce(xs, {}, draw_if_needed(options, xs), options);
}

std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>>
quantized_allreduce_coalesced_with_feedback(at::TensorList xs, at::TensorList residuals,
                                            CGX_PUBLIC_PARAMETERS) {
  const Options options(op, CGX_GIVEN_OPTIONS(CGX_ALLREDUCE));
  check_list(xs, residuals, options);
  check_pairs(xs, residuals, options);
  check(cgx_config_check_feedback(&options.config));
  if (xs.empty()) return {};
  const variable_list results =
      AllReduce::reduce(xs, residuals, draw_if_needed(options, xs, residuals), options);
  const auto half = results.begin() + xs.size();
  return {variable_list(results.begin(), half), variable_list(half, results.end())};
}

std::tuple<at::Tensor, at::Tensor> quantized_allreduce_with_feedback(const at::Tensor& x,
                                                                     const at::Tensor& residual,
                                                                     CGX_PUBLIC_PARAMETERS) {
  const auto [sums, residuals] = quantized_allreduce_coalesced_with_feedback(
      {x}, {residual}, bits, bucket_size, op, group_name, compressor, rounding, config, name,
      carrier);
  return {sums[0], residuals[0]};
}

}  // namespace cgx::torch_ops
