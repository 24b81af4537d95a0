// The backend's allreduce in the core: which calls the core supports, whether they are compressed,
// and their start. Other collectives use the same start.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

#include "backend.h"
#include "cgx/call.h"
#include "coalesced.h"
#include "core.h"
#include "work.h"

namespace cgx::torch_ops {
namespace {

std::optional<cgx_op_t> core_op(const c10d::ReduceOp& op) {
  static const std::map<c10d::ReduceOp::RedOpType, cgx_op_t> kOps = {
      {c10d::ReduceOp::SUM, CGX_SUM},
      {c10d::ReduceOp::AVG, CGX_AVG},
      {c10d::ReduceOp::MIN, CGX_MIN},
      {c10d::ReduceOp::MAX, CGX_MAX},
      {c10d::ReduceOp::PRODUCT, CGX_PRODUCT}};
  const auto found = kOps.find(op.op_);
  if (found == kOps.end()) return std::nullopt;
  return found->second;
}

// Messages are counted by tag, because both ranks need equal counts (randk) and call messages of
// different tags in any order. The limit bounds the memory of programs that use a tag per step.
constexpr int kCountedTags = 1024;

// Whether the core can use the tensor's memory directly.
bool usable_in_place(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_neg();
}

}  // namespace

std::optional<cgx_op_t> Backend::served(at::TensorList tensors, const c10d::ReduceOp& op) const {
  const bool all = std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || (cuda_ && tensor.is_cuda())) &&
           tensor.scalar_type() == tensors[0].scalar_type() && core_dtype(tensor.scalar_type());
  });
  return all ? core_op(op) : std::nullopt;
}

Backend::WorkRef Backend::reduce_in_core(at::TensorList tensors, cgx_op_t op,
                                         const c10d::AllreduceOptions& options, c10d::OpType type) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  for (const at::Tensor& tensor : tensors) {
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
      C10_THROW_ERROR(ValueError,
                      "allreduce: elements of the tensor share memory (it was expanded); pass "
                      "tensor.contiguous()");
    }
    if (tensor.device() != tensors[0].device()) {
      C10_THROW_ERROR(ValueError,
                      c10::str("allreduce: the list holds tensors on ", tensors[0].device(),
                               " and ", tensor.device(),
                               "; all tensors must be on one device: call it once per device"));
    }
  }
  Buffers buffers;
  buffers.results = tensors.vec();
  if (tensors.size() == 1 && usable_in_place(tensors[0])) {
    buffers.input = tensors[0];
  } else {
    buffers.input = pack(tensors);
    buffers.deliver = [flat = buffers.input, results = buffers.results] { unpack(flat, results); };
  }
  buffers.output = buffers.input;

  const Decision decision = decide_and_log(op, tensors, buffers.input.numel());
  CallBuilder call = core_call(CGX_ALLREDUCE, tensors[0].scalar_type(), decision, options.timeout);
  call.fields.op = op;
  call.fields.output = buffers.output.mutable_data_ptr();  // first, because it may materialize a
                                                           // lazy copy
  call.fields.input = buffers.input.const_data_ptr();
  for (const int64_t numel : numels_of(tensors)) call.add(numel);
  return coalesced(start(call.get(), std::move(buffers), type, options.asyncOp));
}

CallBuilder Backend::core_call(cgx_verb_t verb, at::ScalarType dtype, const Decision& decision,
                               Milliseconds timeout, const std::optional<Message>& message) {
  static const Compression exact("bits=32", /*seed=*/0);
  const Compression& how = decision.compression ? *decision.compression : exact;
  const std::string name = message ? c10::str(" message from ", message->from, " to ", message->to,
                                              ", tag ", message->tag)
                                   : "";
  // Matched separately from calls of torch.ops.cgx on this communicator.
  CallBuilder call("c10d" + name);
  // Counters begin again when members change, so a call of the old ones must not count afterwards.
  const std::lock_guard<std::mutex> lock(draws_mutex_);
  call.fields.comm = communicator();
  if (!message) ++sequence_;
  call.fields.verb = verb;
  call.fields.dtype = *core_dtype(dtype);
  call.fields.config = how.config;
  if (how.seed_use != CGX_SEED_UNUSED) {
    const int64_t seed = named_seed(how.seed, name_);
    // A source is never its own destination, so {} is free for collectives.
    const std::array<int, 3> counted =
        message ? std::array{message->from, message->to, message->tag % kCountedTags}
                : std::array<int, 3>{};
    call.fields.seed = nth_seed(message ? named_seed(seed, name) : seed, ++draws_[counted]);
  }
  const Milliseconds allowed = timeout > kNoTimeout ? timeout : options_->timeout;
  call.fields.timeout_s = std::chrono::duration<double>(allowed).count();
  return call;
}

Decision Backend::decide_and_log(cgx_op_t op, at::TensorList tensors, int64_t numel) {
  // The thresholds of bits="auto" were measured between CPUs.
  const auto element_bytes = tensors[0].is_cpu() ? tensors[0].element_size() : 0;
  Decision decision = decide(options_->compression, options_->automatic, op, numel,
                             static_cast<int64_t>(element_bytes));
  const auto call = [&] {
    return c10::str("group '", name_, "': allreduce of ", numel, " ", tensors[0].dtype().name(),
                    tensors.size() == 1 ? "" : c10::str(" in ", tensors.size(), " tensors"));
  };
  if (debug_wanted()) log_decision(call(), decision);
  static std::atomic<bool> warned{false};
  if (decision.surprising && size_ > 1 && !warned.exchange(true)) {
    warn(
        c10::str(call(), " is not compressed, although the group has ",
                 options_->compression->words, " (", decision.reason,
                 "): only gradients are compressed automatically, while autograd completes them "
                 "and no communication hook handles them. To compress this call, wrap it in `with "
                 "cgx_ops.torch.compressed():`. To keep it exact without this warning, wrap it in "
                 "`with cgx_ops.torch.uncompressed():`. This warning is logged once per process."));
  }
  return decision;
}

}  // namespace cgx::torch_ops
