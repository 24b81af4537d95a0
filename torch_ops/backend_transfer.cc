// The backend's messages between two ranks.
//
//   compressed   The core moves it: an all_to_all of these two ranks.
//   exact        The inner backend moves it. Both ranks announce it to each other in the core, by a
//                call without elements. So if one of them compresses, both get CGX_MISMATCH, and
//                the inner backend stops waiting. Nothing waits for an announcement, and the inner
//                backend reports all other failures.
//
// Messages and announcements from one rank to another with one tag match in the order of the calls.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "backend.h"
#include "cgx/completion_pool.h"
#include "core.h"
#include "kernels.h"
#include "named_work.h"
#include "status.h"
#include "work.h"

namespace cgx::torch_ops {

struct Announcement {
  c10::weak_intrusive_ptr<c10d::Work> moving{c10::intrusive_ptr<c10d::Work>()};
  std::mutex mutex;
  std::exception_ptr mismatch;
};

namespace {

constexpr double kNoDeadline = 1e8;  // seconds

std::exception_ptr failure_of_message(cgx_status_t status, std::string text) {
  if (status == CGX_MISMATCH) {
    text +=
        "; call send and recv with the same dtype and size, both inside cgx_ops.torch.compressed() "
        "with equal configs or both outside";
  }
  return std::make_exception_ptr(
      RankFailure(status, {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text));
}

// Adds the remedy to a mismatch.
std::exception_ptr with_remedy(std::exception_ptr failure) {
  try {
    if (failure) std::rethrow_exception(failure);
  } catch (const RankFailure& error) {
    return failure_of_message(error.status, error.what_without_backtrace());
  } catch (...) {  // has its own
  }
  return failure;
}

}  // namespace

Backend::WorkRef Backend::transfer(const Tensors& tensors, const Message& message,
                                   const std::function<WorkRef()>& start) {
  const int peer = message.from == rank_ ? message.to : message.from;
  const bool known = peer >= 0 && peer < size_ && peer != rank_;
  // The inner backend reports bad lists and ranks. NCCL moves CUDA tensors.
  if (tensors.size() == 1 && !tensors[0].is_cpu()) coalesce_inner(tensors[0].device());
  if (tensors.size() != 1 || !tensors[0].is_cpu() || !known) return coalesced(start());
  const at::Tensor& tensor = tensors[0];
  Decision decision{nullptr, "not a dense tensor of float32, float16 or bfloat16"};
  if (served_on_cpu(tensor)) {
    decision = decide_exchange(options_->compression, tensor.numel(),
                               static_cast<int64_t>(tensor.element_size()));
  }
  if (debug_wanted()) {
    log_decision(
        c10::str("group '", name_, "': message of ", tensor.numel(), " ", tensor.dtype().name(),
                 " from rank ", message.from, " to rank ", message.to),
        decision);
  }
  if (decision.compression) return coalesced(transfer_in_core(tensor, message, decision));
  const auto announcement = std::make_shared<Announcement>();
  WorkRef work = start();
  announcement->moving = work;
  check(announce(message, announcement));
  return coalesced(with_named_failures(std::move(work), [announcement](std::exception_ptr failure) {
    const std::lock_guard<std::mutex> lock(announcement->mutex);
    return announcement->mismatch ? announcement->mismatch : failure;
  }));
}

// The source is known, and the message announced, when it has arrived. Then it cannot fail.
Backend::WorkRef Backend::receive_from_any(const Tensors& tensors, int tag,
                                           const std::function<WorkRef()>& start) {
  if (tensors.size() != 1 || !tensors[0].is_cpu()) return coalesced(start());
  const at::Tensor& tensor = tensors[0];
  if (served_on_cpu(tensor) && decide_exchange(options_->compression, tensor.numel(),
                                               static_cast<int64_t>(tensor.element_size()))
                                   .compression) {
    C10_THROW_ERROR(ValueError,
                    "the backend cgx: inside compressed(), recv needs its source: pass src=, or "
                    "receive exact values inside cgx_ops.torch.uncompressed()");
  }
  const c10::weak_intrusive_ptr<Backend> self(
      c10::intrusive_ptr<Backend>::unsafe_reclaim_from_nonowning(this));
  return coalesced(with_named_failures(
      start(), [](std::exception_ptr failure) { return failure; },
      [self, tag](const c10d::Work& work) {
        if (const auto alive = self.lock()) {
          (void)alive->announce({work.sourceRank(), alive->rank_, tag},
                                std::make_shared<Announcement>());
        }
      }));
}

CallBuilder Backend::transfer_call(const Message& message, at::ScalarType dtype,
                                   const Decision& decision) {
  CallBuilder call = core_call(CGX_ALL_TO_ALL, dtype, decision, kNoTimeout, message);
  call.peer = message.from == rank_ ? message.to : message.from;
  call.add(0);
  return call;
}

Backend::WorkRef Backend::transfer_in_core(const at::Tensor& tensor, const Message& message,
                                           const Decision& decision) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  CallBuilder call = transfer_call(message, tensor.scalar_type(), decision);
  std::vector<int64_t> sent(size_, 0), received(size_, 0);
  Buffers buffers{.results = {tensor}};
  if (message.from == rank_) {
    sent[message.to] = tensor.numel();
    buffers.input = tensor.resolve_neg().contiguous();
    buffers.output = at::empty({0}, tensor.options());
    call.fields.input = buffers.input.const_data_ptr();
  } else {
    received[message.from] = tensor.numel();
    try {
      at::assert_no_internal_overlap(tensor);
    } catch (const c10::Error& error) {
      refuse(std::move(call), tensor, error);
      throw;
    }
    const bool in_place = tensor.is_contiguous() && !tensor.is_neg();
    buffers.input = at::empty({0}, tensor.options());
    buffers.output = in_place ? tensor : at::empty(tensor.sizes(), tensor.options());
    if (!in_place) buffers.deliver = [from = buffers.output, tensor] { tensor.copy_(from); };
    call.fields.output = buffers.output.mutable_data_ptr();
  }
  call.fields.input_splits = sent.data();
  call.fields.output_splits = received.data();
  const auto type = message.from == rank_ ? c10d::OpType::SEND : c10d::OpType::RECV;
  return with_named_failures(torch_ops::start(call.get(), std::move(buffers), type), with_remedy);
}

cgx_status_t Backend::announce(const Message& message, std::shared_ptr<Announcement> announcement) {
  const std::vector<int64_t> nothing(size_, 0);
  CallBuilder call = transfer_call(message, at::kFloat, {nullptr, ""});
  call.fields.input_splits = call.fields.output_splits = nothing.data();
  call.fields.timeout_s = kNoDeadline;
  CompletionPool::get();  // may throw, so not first in the callback
  using Owned = std::shared_ptr<Announcement>;
  auto owned = std::make_unique<Owned>(std::move(announcement));
  const auto callback = [](void* context, cgx_status_t status, const char* error) {
    const std::unique_ptr<Owned> owned(static_cast<Owned*>(context));
    if (status != CGX_MISMATCH) return;
    {
      const std::lock_guard<std::mutex> lock((*owned)->mutex);
      (*owned)->mismatch = failure_of_message(status, error);
    }
    // Not on this thread of the core: it may be the last to own the tensors, and freeing them may
    // need the GIL.
    CompletionPool::get().run([announcement = *owned] {
      if (const auto work = announcement->moving.lock()) work->abort();
    });
  };
  const cgx_status_t status = cgx_start(&call.get(), callback, owned.get(), /*request=*/nullptr);
  if (status == CGX_OK) owned.release();
  return status;
}

}  // namespace cgx::torch_ops
