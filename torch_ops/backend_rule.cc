#include "backend_rule.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "backend.h"
#include "core.h"

namespace cgx::torch_ops {
namespace {

constexpr int32_t kExactBits = 32;
constexpr int64_t kWarnFromNumel = 64 << 10;  // elements; smaller tensors are not worth a warning

// The calling thread's context. completing_gradients is set in callbacks of collectives that
// started while gradients were being completed.
Context& thread_context() {
  thread_local Context context;
  return context;
}

std::shared_ptr<const Compression> for_message(const std::shared_ptr<const Compression>& asked,
                                               int64_t numel, int64_t element_bytes) {
  auto found = asked;
  for (const Compression::Larger& from : asked->larger) {
    if (from.element_bytes == element_bytes && numel >= from.numel) found = from.compression;
  }
  return found;
}

}  // namespace

Compression::Compression(const char* config, int64_t seed, std::vector<Larger> larger)
    : config(config_of(config)), seed(seed), larger(std::move(larger)) {
  int32_t use = CGX_SEED_UNUSED;
  cgx::check(cgx_config_seed_use(&this->config, &use));
  seed_use = static_cast<cgx_seed_use_t>(use);
  words = this->config.compressor == CGX_UNIFORM ? std::to_string(this->config.bits) + " bits"
                                                 : cgx_compressor_name(this->config.compressor);
}

Scope exchange_scope(Scope scope) {
  return std::exchange(thread_context().scope, std::move(scope));
}

Context Context::current() { return {thread_context().scope, torch_ops::completing_gradients()}; }

ContextGuard::ContextGuard(const Context& context)
    : outer_(std::exchange(thread_context(), context)) {}
ContextGuard::~ContextGuard() { thread_context() = outer_; }

bool completing_gradients() {
  if (thread_context().completing_gradients) return true;
  if (const auto node = torch::autograd::get_current_node()) {
    return dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get()) != nullptr;
  }
  return torch::autograd::get_current_graph_task_id() >= 0;
}

Decision decide(const std::shared_ptr<const Compression>& group, Automatic automatic, cgx_op_t op,
                int64_t numel, int64_t element_bytes) {
  const Scope& scope = thread_context().scope;
  if (scope.kind == Scope::Kind::kUncompressed) return {nullptr, "inside uncompressed()"};
  const auto& asked = scope.compression ? scope.compression : group;
  const auto compression = for_message(asked, numel, element_bytes);
  if (compression->config.bits == kExactBits) {
    return {nullptr, asked->larger.empty() ? "bits are 32"
                                           : "compression is not faster at this size (auto)"};
  }
  if (op != CGX_SUM && op != CGX_AVG) return {nullptr, "op is not sum or avg"};
  if (numel < std::max<int64_t>(CGX_SMALLEST_COMPRESSED, compression->config.minimal_size)) {
    return {nullptr, "fewer elements than minimal_size"};
  }
  if (scope.kind == Scope::Kind::kCompressed) return {compression, "inside compressed()"};
  if (automatic == Automatic::kEverything) return {compression, "the group compresses all"};
  if (automatic == Automatic::kNothing) {
    return {nullptr, "a user's communication hook handles gradients",
            numel >= kWarnFromNumel && completing_gradients()};
  }
  if (completing_gradients()) return {compression, "autograd is completing gradients"};
  return {nullptr, "outside gradient synchronisation", numel >= kWarnFromNumel};
}

Decision decide_exchange(const std::shared_ptr<const Compression>& group, int64_t numel,
                         int64_t element_bytes) {
  const Scope& scope = thread_context().scope;
  if (scope.kind == Scope::Kind::kUncompressed) return {nullptr, "inside uncompressed()"};
  if (scope.kind != Scope::Kind::kCompressed) return {nullptr, "outside compressed()"};
  const auto compression =
      for_message(scope.compression ? scope.compression : group, numel, element_bytes);
  if (compression->config.bits == kExactBits) return {nullptr, "bits are 32"};
  return {compression, "inside compressed()"};
}

void log_decision(const std::string& call, const Decision& decision) {
  const std::string how = decision.compression ? decision.compression->words : "exact";
  debug(c10::str(call, ": ", how, ", ", decision.reason));
}

}  // namespace cgx::torch_ops
