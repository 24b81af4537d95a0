#include "coalesced.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "kernels.h"
#include "status.h"
#include "work.h"

namespace cgx::torch_ops {

namespace {

// Throws unless both tensors have one dtype and device.
void check_same_kind(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type()) {
    C10_THROW_ERROR(
        TypeError,
        c10::str("cgx::quantized_allreduce_coalesced: the list holds ", a.scalar_type(), " and ",
                 b.scalar_type(), " tensors; one message has one dtype: call it once per dtype"));
  }
  if (a.device() != b.device()) {
    C10_THROW_ERROR(ValueError,
                    c10::str("cgx::quantized_allreduce_coalesced: the list holds tensors on ",
                             a.device(), " and ", b.device(),
                             "; all tensors must be on one device: call it once per device"));
  }
}

}  // namespace

void check_list(at::TensorList xs, at::TensorList residuals, const Options& options) {
  for (const at::TensorList list : {xs, residuals}) {
    for (const at::Tensor& x : list) {
      options.check(x);
      check_same_kind(xs.empty() ? list[0] : xs[0], x);
    }
  }
}

void check_pairs(at::TensorList xs, at::TensorList residuals, const Options& options) {
  const auto same_shape = [](const at::Tensor& x, const at::Tensor& residual) {
    return x.sym_sizes() == residual.sym_sizes();
  };
  if (!std::equal(xs.begin(), xs.end(), residuals.begin(), residuals.end(), same_shape)) {
    C10_THROW_ERROR(ValueError,
                    "cgx::quantized_allreduce_with_feedback: pass a residual for each tensor, of "
                    "its shape; start with torch.zeros_like(x)");
  }
  if (options.op != "sum" && options.op != "avg") {
    C10_THROW_ERROR(ValueError, c10::str("cgx::quantized_allreduce_with_feedback: op '", options.op,
                                         "' does not support residuals: use sum or avg"));
  }
}

Options checked_list(at::TensorList xs, at::TensorList residuals, const Seed& seed,
                     std::string_view call, std::string_view group_name) {
  Options options = Options::unpack(call, group_name);
  check_list(xs, residuals, options);
  if (!residuals.empty()) check_pairs(xs, residuals, options);
  if (!xs.empty()) check_seed(xs[0], seed, options);
  return options;
}

std::vector<int64_t> numels_of(at::TensorList xs) {
  std::vector<int64_t> numels;
  for (const at::Tensor& x : xs) numels.push_back(x.sym_numel().guard_int(__FILE__, __LINE__));
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
  // Waiters may be inside or outside of inference mode, and this write must not bump versions.
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  int64_t offset = 0;
  for (const at::Tensor& x : into) {
    x.copy_(flat.narrow(0, offset, x.numel()).view(x.sizes()));
    offset += x.numel();
  }
}

namespace {

// The buffers of a message of these tensors. With `residuals`, their new values are results too.
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

}  // namespace

std::vector<at::Tensor> all_reduce_coalesced_kernel(at::TensorList xs, at::TensorList residuals,
                                                    const Seed& seed, std::string_view call,
                                                    std::string_view group_name) {
  const Options options = checked_list(xs, residuals, seed, call, group_name);
  if (xs.empty()) return {};
  const Buffers buffers = buffers_of(xs, residuals);
  run(buffers, numels_of(xs), seed, options);
  buffers.deliver();
  return buffers.results;
}

std::vector<at::Tensor> start_coalesced_kernel(at::TensorList xs, at::TensorList residuals,
                                               const Seed& seed, std::string_view call,
                                               std::string_view group_name) {
  const Options options = checked_list(xs, residuals, seed, call, group_name);
  if (xs.empty()) return {};
  Buffers buffers = buffers_of(xs, residuals);
  const std::vector<at::Tensor> results = buffers.results;
  const auto work = launch(std::move(buffers), numels_of(xs), seed, options);
  for (const at::Tensor& result : results) c10d::register_work(result, work);
  return results;
}

std::vector<at::Tensor> all_reduce_coalesced_meta(at::TensorList xs, at::TensorList residuals,
                                                  const Seed& seed, std::string_view call,
                                                  std::string_view group_name) {
  checked_list(xs, residuals, seed, call, group_name);
  std::vector<at::Tensor> results;
  for (const at::TensorList list : {xs, residuals})
    for (const at::Tensor& x : list)
      results.push_back(at::empty_symint(x.sym_sizes(), x.options()));
  return results;
}

}  // namespace cgx::torch_ops
