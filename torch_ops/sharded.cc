// As in allreduce.cc, graphs get start and wait, and eager calls get one blocking operator.
//
//   1. checks and shapes
//   2. kernels
//   3. Sharded: the differentiable operator
//   4. the public operators
#include "sharded.h"

#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "core.h"
#include "kernels.h"
#include "status.h"
#include "tracing.h"
#include "work.h"

namespace cgx::torch_ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ---- 1. checks and shapes ------------------------------------------------------------------

using Shape = c10::SymDimVector;

// Returns the shape of a block of x for `size` ranks. Throws ValueError if it is not divisible.
Shape block_shape(const at::Tensor& x, int64_t size) {
  Shape shape(x.sym_sizes().begin(), x.sym_sizes().end());
  if (size < 1 || shape.empty() || (shape[0] % size).guard_int(__FILE__, __LINE__) != 0) {
    C10_THROW_ERROR(ValueError,
                    c10::str(operator_name(CGX_REDUCE_SCATTER), ": x has shape ", x.sym_sizes(),
                             "; its first dimension must be divisible by the group's ", size,
                             " ranks: pad it with zeros"));
  }
  shape[0] = shape[0] / size;
  return shape;
}

// Returns the shape of the concatenated x of `size` ranks. Scalars become vectors.
Shape gathered_shape(const at::Tensor& x, int64_t size) {
  Shape shape(x.sym_sizes().begin(), x.sym_sizes().end());
  if (shape.empty()) shape.push_back(1);
  shape[0] = shape[0] * size;
  return shape;
}

void check_options(const Options& options, const at::Tensor& x) {
  options.check(x);
  options.check_native();
}

void check_residual(const Options& options, const at::Tensor& x, const at::Tensor& residual) {
  const char* const caller = operator_name(options.verb);
  options.check(residual);
  if (residual.scalar_type() != x.scalar_type() || residual.device() != x.device() ||
      residual.sym_sizes() != x.sym_sizes()) {
    C10_THROW_ERROR(
        ValueError,
        c10::str(caller, ": residual is ", residual.scalar_type(), " of shape ",
                 residual.sym_sizes(), " on ", residual.device(), ", x ", x.scalar_type(),
                 " of shape ", x.sym_sizes(), " on ", x.device(),
                 "; they must have one dtype, shape and device: start with torch.zeros_like(x)"));
  }
  if (options.op != "sum" && options.op != "avg") {
    C10_THROW_ERROR(ValueError, c10::str(caller, ": op '", options.op,
                                         "' does not support residuals: use sum or avg"));
  }
  check(cgx_config_check_feedback(&options.config));
}

// ---- 2. kernels ----------------------------------------------------------------------------

struct Checked {
  Options options;
  Shape shape;  // of the result
};

Checked checked(int32_t verb, const at::Tensor& x, at::TensorList residuals, const Seed& seed,
                std::string_view call, int64_t size, std::string_view group_name) {
  Options options = Options::unpack(call, group_name, "native", verb);
  check_options(options, x);
  check_seed(x, seed, options);
  TORCH_CHECK_VALUE(residuals.size() < 2, operator_name(verb), ": ", residuals.size(),
                    " residuals; at most one is supported");
  for (const at::Tensor& residual : residuals) check_residual(options, x, residual);
  Shape shape = verb == CGX_ALL_GATHER ? gathered_shape(x, size) : block_shape(x, size);
  return {std::move(options), std::move(shape)};
}

struct Prepared {
  Options options;
  Buffers buffers;
  int64_t block;
};

Prepared prepared(int32_t verb, const at::Tensor& x, at::TensorList residuals, const Seed& seed,
                  std::string_view call, int64_t size, std::string_view group_name) {
  Checked known = checked(verb, x, residuals, seed, call, size, group_name);
  or_refuse(known.options, x, [&] { require_size(known.options, size); });
  Buffers buffers{.input = x.contiguous(),
                  .output = at::empty(C10_AS_INTARRAYREF_SLOW(known.shape), x.options())};
  const at::Tensor& block = verb == CGX_ALL_GATHER ? buffers.input : buffers.output;
  const int64_t numel = block.numel();
  if (!residuals.empty()) {
    buffers.residuals = {residuals[0].clone(at::MemoryFormat::Contiguous)};
    buffers.results = {buffers.output, buffers.residuals[0]};
  }
  return {std::move(known.options), std::move(buffers), numel};
}

variable_list results_of(const Buffers& buffers) {
  return buffers.results.empty() ? variable_list{buffers.output} : buffers.results;
}

variable_list run_now(int32_t verb, const at::Tensor& x, at::TensorList residuals, const Seed& seed,
                      std::string_view call, int64_t size, std::string_view group_name) {
  const Prepared call_of = prepared(verb, x, residuals, seed, call, size, group_name);
  run(call_of.buffers, {call_of.block}, seed, call_of.options);
  return results_of(call_of.buffers);
}

variable_list launch_now(int32_t verb, const at::Tensor& x, at::TensorList residuals,
                         const Seed& seed, std::string_view call, int64_t size,
                         std::string_view group_name) {
  Prepared call_of = prepared(verb, x, residuals, seed, call, size, group_name);
  variable_list results = results_of(call_of.buffers);
  const auto work = launch(std::move(call_of.buffers), {call_of.block}, seed, call_of.options);
  for (const at::Tensor& result : results) c10d::register_work(result, work);
  return results;
}

}  // namespace

std::vector<at::Tensor> reduce_scatter_kernel(const at::Tensor& x, at::TensorList residuals,
                                              const Seed& seed, std::string_view call,
                                              int64_t group_size, std::string_view group_name) {
  return run_now(CGX_REDUCE_SCATTER, x, residuals, seed, call, group_size, group_name);
}

std::vector<at::Tensor> start_reduce_scatter_kernel(const at::Tensor& x, at::TensorList residuals,
                                                    const Seed& seed, std::string_view call,
                                                    int64_t group_size,
                                                    std::string_view group_name) {
  return launch_now(CGX_REDUCE_SCATTER, x.clone(at::MemoryFormat::Contiguous), residuals, seed,
                    call, group_size, group_name);
}

std::vector<at::Tensor> borrow_reduce_scatter_kernel(const at::Tensor& x, at::TensorList residuals,
                                                     const Seed& seed, std::string_view call,
                                                     int64_t group_size,
                                                     std::string_view group_name) {
  return launch_now(CGX_REDUCE_SCATTER, x, residuals, seed, call, group_size, group_name);
}

std::vector<at::Tensor> reduce_scatter_meta(const at::Tensor& x, at::TensorList residuals,
                                            const Seed& seed, std::string_view call,
                                            int64_t group_size, std::string_view group_name) {
  const Checked known =
      checked(CGX_REDUCE_SCATTER, x, residuals, seed, call, group_size, group_name);
  variable_list results = {at::empty_symint(known.shape, x.options())};
  for (const at::Tensor& residual : residuals)
    results.push_back(at::empty_symint(residual.sym_sizes(), residual.options()));
  return results;
}

at::Tensor all_gather_kernel(const at::Tensor& x, const Seed& seed, std::string_view call,
                             int64_t group_size, std::string_view group_name) {
  return run_now(CGX_ALL_GATHER, x, {}, seed, call, group_size, group_name)[0];
}

at::Tensor start_all_gather_kernel(const at::Tensor& x, const Seed& seed, std::string_view call,
                                   int64_t group_size, std::string_view group_name) {
  return borrow_all_gather_kernel(x.clone(at::MemoryFormat::Contiguous), seed, call, group_size,
                                  group_name);
}

at::Tensor borrow_all_gather_kernel(const at::Tensor& x, const Seed& seed, std::string_view call,
                                    int64_t group_size, std::string_view group_name) {
  return launch_now(CGX_ALL_GATHER, x, {}, seed, call, group_size, group_name)[0];
}

at::Tensor all_gather_meta(const at::Tensor& x, const Seed& seed, std::string_view call,
                           int64_t group_size, std::string_view group_name) {
  const Checked known = checked(CGX_ALL_GATHER, x, {}, seed, call, group_size, group_name);
  return at::empty_symint(known.shape, x.options());
}

namespace {

// ---- 3. the differentiable operator --------------------------------------------------------

// Returns the block or the gathered tensor, then the new residual.
variable_list call_parts(const at::Tensor& x, at::TensorList residuals, const Seed& seed,
                         const Options& o, int64_t size) {
  static const auto scatter =
      find_operator<decltype(reduce_scatter_kernel)>("cgx::quantized_reduce_scatter_tensor");
  static const auto start_scatter =
      find_operator<decltype(reduce_scatter_kernel)>("cgx::quantized_reduce_scatter_tensor_start");
  static const auto gather =
      find_operator<decltype(all_gather_kernel)>("cgx::quantized_all_gather_into_tensor");
  static const auto start_gather =
      find_operator<decltype(all_gather_kernel)>("cgx::quantized_all_gather_into_tensor_start");
  static const auto wait =
      find_operator<at::Tensor(const at::Tensor&)>("_c10d_functional::wait_tensor");

  const bool traced = notice_trace(x, residuals);
  const std::string packed = o.pack();
  variable_list results;
  if (o.verb == CGX_REDUCE_SCATTER) {
    const auto& op = traced ? start_scatter : scatter;
    results = op.call(x, residuals, seed, packed, size, o.group_name);
  } else {
    results = {(traced ? start_gather : gather).call(x, seed, packed, size, o.group_name)};
  }
  if (traced)
    for (at::Tensor& result : results) result = wait.call(result);
  return results;
}

// reduce_scatter or all_gather. Each is the other's gradient: the gradient of x is gathered from
// all ranks' blocks, or summed over all ranks. A residual is added to x, so both have the same
// gradient.
class Sharded : public torch::autograd::Function<Sharded> {
 public:
  static constexpr bool is_traceable = true;

  // A new residual is returned in *new_residuals: see AllReduce.
  static variable_list forward(AutogradContext* context, const at::Tensor& x,
                               at::TensorList residuals, const Seed& seed, const Options& options,
                               int64_t size, variable_list* new_residuals) {
    context->saved_data["gradient"] = options.gradient().value();
    context->saved_data["has_residual"] = !residuals.empty();
    context->saved_data["size"] = size;
    context->saved_data["divide"] = options.verb == CGX_REDUCE_SCATTER && options.op == "avg";
    context->saved_data["is_number"] = x.dim() == 0;
    context->save_for_backward({seed.value_or(at::Tensor())});
    variable_list results = call_parts(x, residuals, seed, options, size);
    new_residuals->assign(results.begin() + 1, results.end());
    results.resize(1);
    return results;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Options options = Options::of(context->saved_data["gradient"]);
    const int64_t size = context->saved_data["size"].toInt();
    const at::Tensor seed = context->get_saved_variables()[0];
    at::Tensor upward = gradients[0];
    if (context->saved_data["divide"].toBool()) upward = upward.div(size);
    at::Tensor gradient =
        reduce(upward, {}, seed.defined() ? Seed(seed) : std::nullopt, options, size)[0];
    if (context->saved_data["is_number"].toBool()) gradient = gradient.squeeze(0);
    variable_list results = {gradient};
    if (context->saved_data["has_residual"].toBool()) results.push_back(gradient);
    results.resize(results.size() +
                   4);  // undefined gradients of seed, options, size and new_residuals
    return results;
  }

  static variable_list reduce(const at::Tensor& x, at::TensorList residuals, const Seed& seed,
                              const Options& options, int64_t size) {
    if (!require_grad({x}) && !require_grad(residuals))
      return call_parts(x, residuals, seed, options, size);
    variable_list new_residuals, results = apply(x, residuals, seed, options, size, &new_residuals);
    results.insert(results.end(), new_residuals.begin(), new_residuals.end());
    return results;
  }
};

variable_list sharded(const Options& options, const at::Tensor& x, at::TensorList residuals) {
  check_options(options, x);
  for (const at::Tensor& residual : residuals) check_residual(options, x, residual);
  const int64_t size = group_size(options.group_name);
  if (options.verb == CGX_REDUCE_SCATTER) block_shape(x, size);  // before drawing a seed
  return Sharded::reduce(x, residuals, draw_if_needed(options, x, residuals), options, size);
}

}  // namespace

// ---- 4. the public operators ---------------------------------------------------------------

at::Tensor quantized_reduce_scatter(const at::Tensor& x, CGX_PUBLIC_PARAMETERS) {
  return sharded({op, CGX_GIVEN_OPTIONS(CGX_REDUCE_SCATTER)}, x, {})[0];
}

std::tuple<at::Tensor, at::Tensor> quantized_reduce_scatter_with_feedback(
    const at::Tensor& x, const at::Tensor& residual, CGX_PUBLIC_PARAMETERS) {
  const variable_list results = sharded({op, CGX_GIVEN_OPTIONS(CGX_REDUCE_SCATTER)}, x, {residual});
  return {results[0], results[1]};
}

at::Tensor quantized_all_gather(const at::Tensor& x, std::optional<int64_t> bits,
                                std::optional<int64_t> bucket_size, std::string_view group_name,
                                std::optional<std::string_view> compressor,
                                std::optional<std::string_view> rounding, std::string_view config,
                                std::string_view name, std::string_view carrier) {
  return sharded({"sum", CGX_GIVEN_OPTIONS(CGX_ALL_GATHER)}, x, {})[0];
}

}  // namespace cgx::torch_ops
