#include "tracing.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <atomic>

#include "core.h"
#include "cuda.h"
#include "kernels.h"

namespace cgx::torch_ops {
namespace {

std::atomic<void (*)()> trace_hook{nullptr};

}  // namespace

void set_trace_hook(void (*hook)()) { trace_hook = hook; }

bool is_traced(at::TensorList xs, at::TensorList residuals) {
  using c10::impl::TorchDispatchModeKey;
  using c10::impl::TorchDispatchModeTLS;
  constexpr c10::DispatchKeySet tracing(
      {c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
  const auto traces = [&](const at::Tensor& x) { return x.key_set().has_any(tracing); };
  return std::any_of(xs.begin(), xs.end(), traces) ||
         std::any_of(residuals.begin(), residuals.end(), traces) ||
         TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FAKE).has_value() ||
         TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY).has_value() ||
         TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FUNCTIONAL).has_value();
}

bool require_grad(at::TensorList xs) {
  return c10::GradMode::is_enabled() &&
         std::any_of(xs.begin(), xs.end(), [](const at::Tensor& x) { return x.requires_grad(); });
}

bool notice_trace(at::TensorList xs, at::TensorList residuals) {
  const bool traced = is_traced(xs, residuals);
  const auto hook = trace_hook.load();
  if (traced && hook != nullptr) hook();
  return traced;
}

// Noise: the CPU's generator draws a number, which costs the GPU nothing. CUDA tensors in a graph
// (compiled or captured) need the GPU's generator instead, which writes to GPU memory: a number
// would be equal in every replay.
//
// In a traced graph, each draw gets its own empty tensor. Compilers merge equal expressions, even
// of custom random operators, but they never merge two at::empty. Eager draws share one tensor.
//
// Indices (randk) must be equal on all ranks, whose generators may differ. So their seed is derived
// from a count of calls.
Seed draw_if_needed(const Options& options, at::TensorList xs, at::TensorList residuals) {
  static const auto seed = find_operator<decltype(draw_seed_cpu)>("cgx::draw_seed");
  static const auto indices = find_operator<decltype(draw_indices_cpu)>("cgx::draw_indices");
  const auto empty_on = [](at::Device device) {
    return at::empty({0}, at::TensorOptions(at::kFloat).device(device));
  };
  if (!options.needs_seed()) return std::nullopt;
  if (options.seed_use == CGX_SEED_OF_PLACES)
    return indices.call(empty_on(at::kCPU), options.group_name, options.name);
  const bool traced = is_traced(xs, residuals);
  const at::Device device = xs[0].device();
  const bool on_gpu = device.is_cuda() && (traced || capturing(device));
  if (traced || on_gpu) return seed.call(empty_on(on_gpu ? device : at::kCPU));
  static const auto& shared = *new at::Tensor(empty_on(at::kCPU));  // never destroyed
  return seed.call(shared);
}

}  // namespace cgx::torch_ops
