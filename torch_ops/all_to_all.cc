// As in allreduce.cc, graphs get start and wait, and eager calls get one blocking operator.
//
//   1. sizes of blocks
//   2. kernels
//   3. Exchange: the differentiable operator
//   4. the public operator
#include "all_to_all.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "allreduce.h"
#include "core.h"
#include "kernels.h"
#include "status.h"
#include "tracing.h"
#include "work.h"

namespace cgx::torch_ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kMostElements = int64_t{1} << 59;  // in all blocks, as in the core

const char* caller() { return operator_name(CGX_ALL_TO_ALL); }

// ---- 1. sizes of blocks --------------------------------------------------------------------

using Sizes = std::vector<c10::SymInt>;

c10::SymInt sum_of(c10::SymIntArrayRef sizes) {
  c10::SymInt sum = 0;
  for (const c10::SymInt& size : sizes) sum = sum + size;
  return sum;
}

// Returns the rows of equal blocks of x. Throws ValueError if x cannot be divided.
Sizes equal_blocks(const at::Tensor& x, const Options& options, const char* what) {
  const int64_t ranks = group_size(options.group_name);
  const auto require_divisible = [&] {
    if ((x.sym_size(0) % ranks).guard_int(__FILE__, __LINE__) == 0) return;
    C10_THROW_ERROR(ValueError,
                    c10::str(caller(), ": x has shape ", x.sym_sizes(), "; the group's ", ranks,
                             " ranks do not divide its first dimension: pass ", what));
  };
  if (x.is_meta() || is_traced({at::Tensor(x)}))
    require_divisible();
  else
    or_refuse(options, x, require_divisible);
  return Sizes(ranks, x.sym_size(0) / ranks);
}

void check_sizes(c10::SymIntArrayRef sizes, int64_t ranks, const char* what) {
  if (static_cast<int64_t>(sizes.size()) != ranks) {
    C10_THROW_ERROR(ValueError,
                    c10::str(caller(), ": ", what, " has ", sizes.size(),
                             " sizes; it must have one for each of the group's ", ranks, " ranks"));
  }
  const auto numbers = c10::asIntArrayRefSlowOpt(sizes);
  if (!numbers) return;  // the kernel checks the numbers
  int64_t rest = kMostElements;
  for (const int64_t number : *numbers) {
    if (number < 0 || number > rest) {
      C10_THROW_ERROR(ValueError, c10::str(caller(), ": ", what, " are ", sizes,
                                           "; they must be at least 0, and in all at most 2**59"));
    }
    rest -= number;
  }
}

// Throws ValueError unless the sizes are those of blocks of x.
void check_blocks(const at::Tensor& x, c10::SymIntArrayRef output_sizes,
                  c10::SymIntArrayRef input_sizes, const Options& options) {
  const int64_t ranks = group_size(options.group_name);
  check_sizes(output_sizes, ranks, "output_split_sizes");
  check_sizes(input_sizes, ranks, "input_split_sizes");
  const c10::SymInt sum = sum_of(input_sizes);
  const auto number = sum.maybe_as_int(), rows = x.sym_size(0).maybe_as_int();
  if (number && rows && *number != *rows) {
    C10_THROW_ERROR(ValueError,
                    c10::str(caller(), ": input_split_sizes add up to ", sum, ", but x has ",
                             x.sym_size(0), " rows: its shape is ", x.sym_sizes()));
  }
}

void check_exchange(const Options& options, const at::Tensor& x) {
  options.check(x);
  options.check_native();
  if (x.dim() == 0) {
    C10_THROW_ERROR(ValueError,
                    c10::str(caller(), ": x is a scalar; it must have rows: pass x.reshape(1)"));
  }
}

c10::SymDimVector result_shape(const at::Tensor& x, c10::SymIntArrayRef output_sizes) {
  c10::SymDimVector shape(x.sym_sizes().begin(), x.sym_sizes().end());
  shape[0] = sum_of(output_sizes);
  return shape;
}

// Returns the elements of each block.
std::vector<int64_t> elements(const at::Tensor& x, at::IntArrayRef rows) {
  const int64_t row = c10::multiply_integers(x.sizes().slice(1));
  std::vector<int64_t> found;
  for (const int64_t each : rows) found.push_back(each * row);
  return found;
}

// ---- 2. kernels ----------------------------------------------------------------------------

Options checked_exchange(const at::Tensor& x, const Seed& seed, std::string_view call,
                         std::string_view group_name) {
  Options options = Options::unpack(call, group_name, "native", CGX_ALL_TO_ALL);
  check_exchange(options, x);
  check_seed(x, seed, options);
  return options;
}

struct Exchanged {
  Options options;
  Buffers buffers;
  Splits splits;
};

Exchanged exchange_of(const at::Tensor& x, c10::SymIntArrayRef output_sizes,
                      c10::SymIntArrayRef input_sizes, const Seed& seed, std::string_view call,
                      std::string_view group_name) {
  Exchanged made{checked_exchange(x, seed, call, group_name), {}, {}};
  or_refuse(made.options, x, [&] {
    check_blocks(x, output_sizes, input_sizes, made.options);
    const c10::SymDimVector shape = result_shape(x, output_sizes);
    made.buffers = {.input = x.contiguous(),
                    .output = at::empty(C10_AS_INTARRAYREF_SLOW(shape), x.options())};
    made.splits = {.input = elements(x, C10_AS_INTARRAYREF_SLOW(input_sizes)),
                   .output = elements(x, C10_AS_INTARRAYREF_SLOW(output_sizes)),
                   .row = c10::multiply_integers(x.sizes().slice(1))};
  });
  return made;
}

}  // namespace

at::Tensor all_to_all_kernel(const at::Tensor& x, c10::SymIntArrayRef output_split_sizes,
                             c10::SymIntArrayRef input_split_sizes, const Seed& seed,
                             std::string_view call, std::string_view group_name) {
  const Exchanged call_of =
      exchange_of(x, output_split_sizes, input_split_sizes, seed, call, group_name);
  run(call_of.buffers, {0}, seed, call_of.options, &call_of.splits);
  return call_of.buffers.output;
}

at::Tensor start_all_to_all_kernel(const at::Tensor& x, c10::SymIntArrayRef output_split_sizes,
                                   c10::SymIntArrayRef input_split_sizes, const Seed& seed,
                                   std::string_view call, std::string_view group_name) {
  return borrow_all_to_all_kernel(x.clone(at::MemoryFormat::Contiguous), output_split_sizes,
                                  input_split_sizes, seed, call, group_name);
}

at::Tensor borrow_all_to_all_kernel(const at::Tensor& x, c10::SymIntArrayRef output_split_sizes,
                                    c10::SymIntArrayRef input_split_sizes, const Seed& seed,
                                    std::string_view call, std::string_view group_name) {
  Exchanged call_of = exchange_of(x, output_split_sizes, input_split_sizes, seed, call, group_name);
  at::Tensor output = call_of.buffers.output;
  const auto work = launch(std::move(call_of.buffers), {0}, seed, call_of.options, &call_of.splits);
  c10d::register_work(output, work);
  return output;
}

at::Tensor all_to_all_meta(const at::Tensor& x, c10::SymIntArrayRef output_split_sizes,
                           c10::SymIntArrayRef input_split_sizes, const Seed& seed,
                           std::string_view call, std::string_view group_name) {
  const Options options = checked_exchange(x, seed, call, group_name);
  check_blocks(x, output_split_sizes, input_split_sizes, options);
  return at::empty_symint(result_shape(x, output_split_sizes), x.options());
}

namespace {

// ---- 3. the differentiable operator --------------------------------------------------------

at::Tensor call_parts(const at::Tensor& x, c10::SymIntArrayRef output_sizes,
                      c10::SymIntArrayRef input_sizes, const Seed& seed, const Options& o) {
  static const auto blocking =
      find_operator<decltype(all_to_all_kernel)>("cgx::quantized_all_to_all_single");
  static const auto start =
      find_operator<decltype(all_to_all_kernel)>("cgx::quantized_all_to_all_single_start");
  static const auto wait =
      find_operator<at::Tensor(const at::Tensor&)>("_c10d_functional::wait_tensor");

  const std::string packed = o.pack();
  if (!notice_trace({at::Tensor(x)}))
    return blocking.call(x, output_sizes, input_sizes, seed, packed, o.group_name);
  return wait.call(start.call(x, output_sizes, input_sizes, seed, packed, o.group_name));
}

// The gradient of a block is sent back to the rank that sent the block. Its options are separate.
class Exchange : public torch::autograd::Function<Exchange> {
 public:
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const Sizes& output_sizes, const Sizes& input_sizes, const Seed& seed,
                            const Options& options, const Seed& back_seed, const Options& back) {
    context->saved_data["back"] = back.value();
    context->saved_data["output_sizes"] = c10::SymIntArrayRef(input_sizes);
    context->saved_data["input_sizes"] = c10::SymIntArrayRef(output_sizes);
    context->save_for_backward({back_seed.value_or(at::Tensor())});
    return call_parts(x, output_sizes, input_sizes, seed, options);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const Options options = Options::of(context->saved_data["back"]);
    const Sizes output_sizes = context->saved_data["output_sizes"].toSymIntVector();
    const Sizes input_sizes = context->saved_data["input_sizes"].toSymIntVector();
    const at::Tensor saved = context->get_saved_variables()[0];
    const Seed seed = saved.defined() ? Seed(saved) : std::nullopt;
    variable_list results = {exchanged(gradients[0], output_sizes, input_sizes, seed, options, seed,
                                       options.gradient())};
    results.resize(7);  // undefined gradients of all other arguments
    return results;
  }

  static at::Tensor exchanged(const at::Tensor& x, const Sizes& output_sizes,
                              const Sizes& input_sizes, const Seed& seed, const Options& options,
                              const Seed& back_seed, const Options& back) {
    if (!require_grad({at::Tensor(x)}))
      return call_parts(x, output_sizes, input_sizes, seed, options);
    return apply(x, output_sizes, input_sizes, seed, options, back_seed, back);
  }
};

}  // namespace

// ---- 4. the public operator ----------------------------------------------------------------

at::Tensor quantized_all_to_all(const at::Tensor& x, at::OptionalSymIntArrayRef output_split_sizes,
                                at::OptionalSymIntArrayRef input_split_sizes,
                                std::optional<int64_t> bits, std::optional<int64_t> bucket_size,
                                std::string_view group_name,
                                std::optional<std::string_view> compressor,
                                std::optional<std::string_view> rounding, std::string_view config,
                                std::string_view name, std::string_view carrier,
                                std::string_view grad_config) {
  const Options options("sum", CGX_GIVEN_OPTIONS(CGX_ALL_TO_ALL));
  Options back = options.gradient();
  back = Options(back.op, back.depth,
                 overridden({.config = grad_config.empty() ? "bits=32" : grad_config}, back.verb),
                 back.name, back.group_name, back.carrier, back.verb);
  // Before any check of this rank's tensor, and whether or not a gradient is recorded: all ranks,
  // and a forward pass that checkpointing repeats, must draw equally often.
  const Seed seed = draw_if_needed(options, x), back_seed = draw_if_needed(back, x);
  or_refuse(options, x, [&] { check_exchange(options, x); });
  const auto sizes = [&](const at::OptionalSymIntArrayRef& given, const char* what) {
    return given ? given->vec() : equal_blocks(x, options, what);
  };
  const Sizes output_sizes = sizes(output_split_sizes, "output_split_sizes");
  const Sizes input_sizes = sizes(input_split_sizes, "input_split_sizes");
  return Exchange::exchanged(x, output_sizes, input_sizes, seed, options, back_seed, back);
}

}  // namespace cgx::torch_ops
