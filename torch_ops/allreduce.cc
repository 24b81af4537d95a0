// Why a graph gets start + wait and not one operator: inductor drops, merges and reorders a plain
// functional operator as it likes, and then ranks wait for each other for ever. It keeps a start
// that _c10d_functional.wait_tensor waits for, in the order of all collectives (docs/design.md, 5).
// Outside of graphs one blocking operator does it: nothing to register, one thing in a profile.
//
//   1. the parts, called by the dispatcher, so that tracers and modes see them
//   2. AllReduce: the differentiable whole
//   3. the public operators
#include "allreduce.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <optional>
#include <string_view>
#include <utility>

#include "kernels.h"
#include "options.h"

namespace cgx::torch_ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Seed = std::optional<at::Tensor>;

std::atomic<void (*)()> trace_hook{nullptr};

// ---- 1. the parts --------------------------------------------------------------------------

// Each draw gets an empty tensor of its own: compilers merge equal expressions, a custom random
// operator's too, but never take two at::empty for one.
Seed draw_if_needed(const Options& options) {
  if (!options.stochastic()) return std::nullopt;
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("cgx::draw_seed", "")
                             .typed<decltype(draw_seed)>();
  return op.call(at::empty({0}, at::TensorOptions(at::kFloat).device(at::kCPU)));
}

// Whether a graph is being built. Modes of a user (a profile, a flop count, opcheck) build none.
bool is_traced(const at::Tensor& x) {
  using c10::impl::TorchDispatchModeKey;
  using c10::impl::TorchDispatchModeTLS;
  constexpr c10::DispatchKeySet tracing(
      {c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
  return x.key_set().has_any(tracing) ||
         TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FAKE).has_value() ||
         TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY).has_value() ||
         TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FUNCTIONAL).has_value();
}

at::Tensor all_reduce(const at::Tensor& x, const Seed& seed, const Options& o) {
  const auto find = [](const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  };
  static const auto blocking = find("cgx::quantized_all_reduce").typed<decltype(all_reduce_cpu)>();
  static const auto start = find("cgx::quantized_all_reduce_start").typed<decltype(start_cpu)>();
  static const auto wait =
      find("_c10d_functional::wait_tensor").typed<at::Tensor(const at::Tensor&)>();

  const bool traced = is_traced(x);
  if (const auto hook = trace_hook.load(); traced && hook != nullptr) hook();
  const at::Tensor result =
      (traced ? start : blocking)
          .call(x, seed, o.bits, o.bucket_size, o.op, o.rounding, o.algorithm, o.gather_bits,
                o.skip_incomplete_buckets, o.minimal_size, o.name, o.depth, o.group_name);
  return traced ? wait.call(result) : result;
}

// ---- 2. the differentiable whole -----------------------------------------------------------

// Every rank's output is the same sum (or mean) of all inputs, so the gradient of one rank's input
// is the sum (or mean) of all ranks' output gradients: the same collective, quantized like it.
class AllReduce : public torch::autograd::Function<AllReduce> {
 public:
  static constexpr bool is_traceable = true;  // backward holds no state that tracing would miss

  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Seed& seed,
                            const Options& options) {
    context->saved_data["gradient"] = options.gradient().pack();
    context->save_for_backward({seed.value_or(at::Tensor())});
    return all_reduce(x, seed, options);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Options options = Options::unpack(context->saved_data["gradient"]);
    const at::Tensor seed = context->get_saved_variables()[0];
    return {reduce(gradients[0], seed.defined() ? Seed(seed) : std::nullopt, options), at::Tensor(),
            at::Tensor()};
  }

  static at::Tensor reduce(const at::Tensor& x, const Seed& seed, const Options& options) {
    if (c10::GradMode::is_enabled() && x.requires_grad()) return apply(x, seed, options);
    return all_reduce(x, seed, options);
  }
};

}  // namespace

// ---- 3. the public operators ---------------------------------------------------------------

void set_trace_hook(void (*hook)()) { trace_hook = hook; }

at::Tensor quantized_allreduce(const at::Tensor& x, int64_t bits, int64_t bucket_size,
                               std::string_view op, std::string_view group_name,
                               std::string_view rounding, std::string_view algorithm,
                               std::optional<int64_t> gather_bits, bool skip_incomplete_buckets,
                               int64_t minimal_size, std::string_view name) {
  const Options options(bits, bucket_size, op, rounding, algorithm, gather_bits.value_or(0),
                        skip_incomplete_buckets, minimal_size, name, /*depth=*/0, group_name);
  options.check(x);
  return AllReduce::reduce(x, draw_if_needed(options), options);
}

void quantized_allreduce_(at::Tensor& x, int64_t bits, int64_t bucket_size, std::string_view op,
                          std::string_view group_name, std::string_view rounding,
                          std::string_view algorithm, std::optional<int64_t> gather_bits,
                          bool skip_incomplete_buckets, int64_t minimal_size,
                          std::string_view name) {
  const Options options(bits, bucket_size, op, rounding, algorithm, gather_bits.value_or(0),
                        skip_incomplete_buckets, minimal_size, name, /*depth=*/0, group_name);
  options.check(x);
  const bool differentiable = c10::GradMode::is_enabled() && x.requires_grad();
  if (differentiable && x.is_leaf()) {
    C10_THROW_ERROR(ValueError,
                    "cgx::quantized_allreduce_: x is a leaf that requires grad and cannot be "
                    "changed in place; call it under torch.no_grad() or on x.grad");
  }
  at::assert_no_internal_overlap(x);
  const Seed seed = draw_if_needed(options);
  if (differentiable || is_traced(x) || x.is_meta() ||
      c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    x.copy_(AllReduce::reduce(x, seed, options));
    return;
  }
  const at::Tensor buffer = x.contiguous();
  run(buffer, buffer, seed, options);
  if (!buffer.is_same(x)) {
    x.copy_(buffer);
  } else if (!x.is_inference()) {
    x.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace cgx::torch_ops
