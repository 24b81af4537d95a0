#include "coalesced.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

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

std::vector<at::Tensor> all_reduce_coalesced_kernel(at::TensorList xs, const Seed& seed,
                                                    std::string_view call,
                                                    std::string_view group_name) {
  const Options options = Options::unpack(call, group_name);
  check_list(xs, seed, options);
  if (xs.empty()) return {};
  const at::Tensor flat = pack(xs);
  run(flat, flat, numels_of(xs), seed, options);
  std::vector<at::Tensor> results = empty_like(xs);
  unpack(flat, results);
  return results;
}

std::vector<at::Tensor> start_coalesced_kernel(at::TensorList xs, const Seed& seed,
                                               std::string_view call, std::string_view group_name) {
  const Options options = Options::unpack(call, group_name);
  check_list(xs, seed, options);
  if (xs.empty()) return {};
  const at::Tensor flat = pack(xs);
  const std::vector<at::Tensor> results = empty_like(xs);
  const auto deliver = [flat, results] { unpack(flat, results); };
  const auto work = launch({.input = flat, .output = flat, .results = results, .deliver = deliver},
                           numels_of(xs), seed, options);
  for (const at::Tensor& result : results) c10d::register_work(result, work);
  return results;
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
