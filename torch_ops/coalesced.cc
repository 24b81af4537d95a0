#include "coalesced.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <utility>

#include "kernels.h"
#include "status.h"
#include "work.h"

namespace cgx::torch_ops {

void check_alike(at::TensorList xs) {
  for (const at::Tensor& x : xs) {
    if (x.scalar_type() != xs[0].scalar_type()) {
      C10_THROW_ERROR(TypeError,
                      c10::str("cgx::quantized_allreduce_coalesced: the list holds ",
                               xs[0].scalar_type(), " and ", x.scalar_type(),
                               " tensors; one message has one dtype: call it once for each"));
    }
    if (x.device() != xs[0].device()) {
      C10_THROW_ERROR(
          ValueError,
          c10::str("cgx::quantized_allreduce_coalesced: the list holds tensors on ", xs[0].device(),
                   " and ", x.device(), "; one message has one device: call it once for each"));
    }
  }
}

void check_list(at::TensorList xs, const Seed& seed, const Options& options) {
  for (const at::Tensor& x : xs) check_call(x, seed, options);
  check_alike(xs);
}

std::pair<at::TensorList, at::TensorList> halves(at::TensorList pairs) {
  const size_t half = pairs.size() / 2;
  return {pairs.slice(0, half), pairs.slice(half)};
}

void check_pairs(at::TensorList pairs, const Options& options) {
  for (const at::Tensor& x : pairs) options.check(x);
  check_alike(pairs);
  const auto [xs, residuals] = halves(pairs);
  bool alike = xs.size() == residuals.size();
  for (size_t i = 0; alike && i < xs.size(); ++i)
    alike = xs[i].sym_sizes() == residuals[i].sym_sizes();
  if (!alike) {
    C10_THROW_ERROR(ValueError,
                    "cgx::quantized_allreduce_with_feedback: there must be a residual for each "
                    "tensor, of its shape: begin with torch.zeros_like(x)");
  }
  if (options.op != "sum" && options.op != "avg") {
    C10_THROW_ERROR(ValueError, c10::str("cgx::quantized_allreduce_with_feedback: op '", options.op,
                                         "' has no residual: give sum or avg"));
  }
}

std::vector<int64_t> numels_of(at::TensorList xs) {
  std::vector<int64_t> numels;
  for (const at::Tensor& x : xs) numels.push_back(x.numel());
  return numels;
}

at::Tensor pack(at::TensorList xs) {
  int64_t numel = 0;
  for (const at::Tensor& x : xs) numel += x.numel();
  const at::Tensor flat = at::empty({numel}, xs[0].options());
  int64_t offset = 0;
  for (const at::Tensor& x : xs) {
    flat.narrow(0, offset, x.numel()).view(x.sizes()).copy_(x);
    offset += x.numel();
  }
  return flat;
}

std::vector<at::Tensor> empty_like(at::TensorList xs) {
  std::vector<at::Tensor> results;
  for (const at::Tensor& x : xs) {
    results.push_back(at::empty_like(x, at::MemoryFormat::Contiguous));
  }
  return results;
}

void unpack(const at::Tensor& flat, at::TensorList into) {
  // Whoever waits may be inside or outside of inference mode; no version counts this write.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  int64_t offset = 0;
  for (const at::Tensor& x : into) {
    x.copy_(flat.narrow(0, offset, x.numel()).view(x.sizes()));
    offset += x.numel();
  }
}

namespace {

// The buffers of a message of these tensors; with `residuals`, whose new values are results too.
Buffers buffers_of(at::TensorList xs, at::TensorList residuals) {
  const at::Tensor flat = pack(xs);
  Buffers buffers{.input = flat, .output = flat, .results = empty_like(xs)};
  buffers.deliver = [flat, to = buffers.results] { unpack(flat, to); };
  if (residuals.empty()) return buffers;
  const at::Tensor kept = pack(residuals);
  const std::vector<at::Tensor> new_residuals = empty_like(residuals);
  buffers.residuals = {kept};
  buffers.results.insert(buffers.results.end(), new_residuals.begin(), new_residuals.end());
  buffers.deliver = [first = buffers.deliver, kept, new_residuals] {
    first();
    unpack(kept, new_residuals);
  };
  return buffers;
}

// What a kernel is called with, checked.
struct ListCall {
  Options options;
  at::TensorList xs, residuals;
};

ListCall call_of(at::TensorList xs, const Seed& seed, std::string_view call,
                 std::string_view group_name) {
  ListCall made{Options::unpack(call, group_name), xs, {}};
  check_list(xs, seed, made.options);
  return made;
}

ListCall call_of_pairs(at::TensorList pairs, const Seed& seed, std::string_view call,
                       std::string_view group_name) {
  ListCall made = call_of(pairs, seed, call, group_name);
  check_pairs(pairs, made.options);
  std::tie(made.xs, made.residuals) = halves(pairs);
  return made;
}

std::vector<at::Tensor> reduce(const ListCall& call, const Seed& seed) {
  if (call.xs.empty()) return {};
  const Buffers buffers = buffers_of(call.xs, call.residuals);
  run(buffers, numels_of(call.xs), seed, call.options);
  buffers.deliver();
  return buffers.results;
}

std::vector<at::Tensor> start(const ListCall& call, const Seed& seed) {
  if (call.xs.empty()) return {};
  Buffers buffers = buffers_of(call.xs, call.residuals);
  const std::vector<at::Tensor> results = buffers.results;
  const auto work = launch(std::move(buffers), numels_of(call.xs), seed, call.options);
  for (const at::Tensor& result : results) c10d::register_work(result, work);
  return results;
}

}  // namespace

std::vector<at::Tensor> all_reduce_coalesced_kernel(at::TensorList xs, const Seed& seed,
                                                    std::string_view call,
                                                    std::string_view group_name) {
  return reduce(call_of(xs, seed, call, group_name), seed);
}

std::vector<at::Tensor> start_coalesced_kernel(at::TensorList xs, const Seed& seed,
                                               std::string_view call, std::string_view group_name) {
  return start(call_of(xs, seed, call, group_name), seed);
}

std::vector<at::Tensor> all_reduce_with_feedback_kernel(at::TensorList pairs, const Seed& seed,
                                                        std::string_view call,
                                                        std::string_view group_name) {
  return reduce(call_of_pairs(pairs, seed, call, group_name), seed);
}

std::vector<at::Tensor> start_with_feedback_kernel(at::TensorList pairs, const Seed& seed,
                                                   std::string_view call,
                                                   std::string_view group_name) {
  return start(call_of_pairs(pairs, seed, call, group_name), seed);
}

std::vector<at::Tensor> all_reduce_with_feedback_meta(at::TensorList pairs, const Seed& seed,
                                                      std::string_view call,
                                                      std::string_view group_name) {
  check_pairs(pairs, Options::unpack(call, group_name));
  return all_reduce_coalesced_meta(pairs, seed, call, group_name);
}

std::vector<at::Tensor> all_reduce_coalesced_meta(at::TensorList xs, const Seed& seed,
                                                  std::string_view call,
                                                  std::string_view group_name) {
  check_list(xs, seed, Options::unpack(call, group_name));
  std::vector<at::Tensor> results;
  for (const at::Tensor& x : xs) results.push_back(at::empty_symint(x.sym_sizes(), x.options()));
  return results;
}

}  // namespace cgx::torch_ops
