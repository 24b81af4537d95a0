#include "work.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <iterator>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "backend_rule.h"
#include "cgx/completion_pool.h"
#include "cgx/verb.h"
#include "core.h"
#include "cuda.h"
#include "status.h"

namespace cgx::torch_ops {
namespace {

using c10::ivalue::Future;

// Writes a collective's results. The tensors may be leaves that require gradients or inference
// tensors, as with collectives that write to them directly.
void deliver(const Buffers& buffers) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  if (buffers.deliver) buffers.deliver();
}

// The Work of CPU tensors. Owns the request, and keeps its buffers alive until the collective has
// ended.
class CpuWork final : public c10d::Work {
 public:
  CpuWork(Buffers buffers, c10d::OpType type, const char* title)
      : c10d::Work(
            /*rank=*/-1, type, title,
            buffers.results.empty() ? std::vector<at::Tensor>{buffers.input} : buffers.results),
        buffers_(std::move(buffers)),
        results_(buffers_.results.empty() ? std::vector<at::Tensor>{buffers_.output}
                                          : buffers_.results) {}

  // The core may still write to the buffers. If no caller waited, a pool thread does: this thread
  // may hold the GIL.
  ~CpuWork() override {
    if (request_ == nullptr) return;
    CompletionPool::get().run([request = request_, buffers = std::move(buffers_)] {
      try {
        if (cgx_wait(request) == CGX_OK) deliver(buffers);
      } catch (...) {  // no caller is left to handle failures
      }
    });
  }

  void start(const cgx_collective_t& collective) {
    check(cgx_start(&collective, /*callback=*/nullptr, /*context=*/nullptr, &request_));
  }

  bool isCompleted() override {
    const std::unique_lock<std::mutex> lock(request_mutex_, std::try_to_lock);
    // If another thread holds the lock, it is in wait(), so the collective has not ended.
    return lock.owns_lock() && poll();
  }

  bool isSuccess() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return completed_ && !exception_;
  }

  // Throws the collective's failure. A timeout shorter than the collective's own throws
  // DistBackendError, and the collective continues.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    if (timeout > kNoTimeout) {
      const auto deadline = std::chrono::steady_clock::now() + timeout;
      auto pause = std::chrono::microseconds(20);
      while (!isCompleted()) {
        if (std::chrono::steady_clock::now() >= deadline) {
          C10_THROW_ERROR(DistBackendError,
                          c10::str("cgx: the collective has not ended after the ", timeout.count(),
                                   " ms given to wait(); it continues until its own deadline"));
        }
        std::this_thread::sleep_for(pause);
        pause = std::min(pause * 2, std::chrono::microseconds(1000));
      }
    }
    {
      const std::lock_guard<std::mutex> lock(request_mutex_);
      join();
    }
    // After wait() the future must be complete: DistributedDataParallel reads it when it joins.
    c10::intrusive_ptr<Future> future;
    {
      const std::lock_guard<std::mutex> lock(future_mutex_);
      future = future_;
    }
    if (future) future->wait();
    if (const std::exception_ptr failure = exception()) std::rethrow_exception(failure);
    return true;
  }

  void synchronize() override { wait(); }
  std::vector<at::Tensor> result() override { return results_; }

  // The future's value is the list of tensors of result().
  c10::intrusive_ptr<Future> getFuture() override {
    const std::lock_guard<std::mutex> lock(future_mutex_);
    if (future_) return future_;
    CompletionPool::get();  // may throw: before anyone has the future
    future_ = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()));
    // The callback keeps this object alive, since the caller may keep only the future.
    using Self = c10::intrusive_ptr<CpuWork>;
    auto self = std::make_unique<Self>(Self::unsafe_reclaim_from_nonowning(this));
    const auto callback = [](void* context, cgx_status_t, const char*) {
      auto* self = static_cast<Self*>(context);
      CompletionPool::get().run([self] {
        const std::unique_ptr<Self> owned(self);
        (*owned)->complete_future();
      });
    };
    const std::unique_lock<std::mutex> request_lock(request_mutex_, std::try_to_lock);
    if (!request_lock.owns_lock()) {
      // A thread in wait() is about to see the end, so let the pool wait for that thread.
      callback(self.release(), CGX_OK, "");
    } else if (request_ != nullptr) {
      check(cgx_notify(request_, callback, self.get()));
      self.release();
    } else {
      mark_future();  // there are no callbacks yet that could block
    }
    return future_;
  }

 private:
  // Whether the collective has ended. Needs request_mutex_, as join() does.
  bool poll() {
    if (request_ == nullptr) return true;
    int32_t done = 0;
    // If cgx_test fails, cgx_wait returns the reason.
    if (cgx_test(request_, &done) == CGX_OK && done == 0) return false;
    join();
    return true;
  }

  // Waits for the end.
  void join() {
    if (request_ == nullptr) return;
    std::exception_ptr failure;
    try {
      check(cgx_wait(std::exchange(request_, nullptr)));
      deliver(buffers_);
    } catch (...) {
      failure = std::current_exception();
    }
    buffers_ = {};
    finish(failure);
  }

  void complete_future() {
    {
      const std::lock_guard<std::mutex> lock(request_mutex_);
      join();
    }
    mark_future();
  }

  // Call after the end.
  void mark_future() {
    const ContextGuard guard(context_);
    if (const std::exception_ptr failure = exception()) {
      future_->setError(failure);
    } else {
      future_->markCompleted(c10::IValue(results_));
    }
  }

  std::mutex request_mutex_;          // held by the thread that calls the core with request_
  cgx_request_t* request_ = nullptr;  // null once the collective has ended
  Buffers buffers_;
  const std::vector<at::Tensor> results_;
  const Context context_ = Context::current();  // the call's context, for the future's callbacks
  std::mutex future_mutex_;
  c10::intrusive_ptr<Future> future_;
};

}  // namespace

TorchVerb torch_verb(int32_t verb) {
  static constexpr TorchVerb kNames[] = {{c10d::OpType::ALLREDUCE, "all_reduce"},
                                         {c10d::OpType::REDUCE_SCATTER, "reduce_scatter"},
                                         {c10d::OpType::ALLGATHER, "all_gather"},
                                         {c10d::OpType::ALLTOALL_BASE, "all_to_all"}};
  static_assert(std::size(kNames) == std::size(kVerbs));
  return kNames[verb];
}

c10::intrusive_ptr<c10d::Work> start(const cgx_collective_t& collective, Buffers buffers,
                                     c10d::OpType type, bool asynchronous) {
  if (buffers.output.is_cuda()) {
    return start_cuda(collective, std::move(buffers), type, asynchronous);
  }
  const char* title = at::hasCallbacks() ? profile_title(collective) : nullptr;
  auto work = c10::make_intrusive<CpuWork>(std::move(buffers), type, title);
  work->start(collective);
  return work;
}

const char* profile_title(const cgx_collective_t& collective) {
  static constexpr int64_t kItemSizes[] = {4, 2, 2};
  constexpr int32_t kExactBits = 32;
  std::set<int32_t> widths;
  std::set<std::string> compressors;
  int64_t numel = 0;
  for (int64_t i = 0; i < collective.num_segments; ++i) {
    const cgx_segment_t& segment = collective.segments[i];
    const cgx_config_t& config = segment.config ? *segment.config : collective.config;
    if (segment.bits == kExactBits || config.compressor == CGX_UNIFORM)
      widths.insert(segment.bits);
    else
      compressors.insert(cgx_compressor_name(config.compressor));
    numel += segment.numel;
  }
  const char* name = torch_verb(collective.verb).name;
  if (const int32_t* peer = collective.peer) {
    name = collective.output ? "recv" : "send";
    numel = collective.input_splits[*peer] + collective.output_splits[*peer];
  } else if (const int64_t* blocks = collective.input_splits) {
    auto info = make<cgx_comm_info_t>();
    check(cgx_comm_info(collective.comm, &info));
    numel = std::accumulate(blocks, blocks + info.size, int64_t{0});
  }
  std::string how;
  for (const int32_t width : widths) how += (how.empty() ? "" : "/") + std::to_string(width);
  if (!how.empty()) how += " bits";
  for (const std::string& name : compressors) how += (how.empty() ? "" : "/") + name;
  auto plan = make<cgx_plan_t>();
  check(cgx_plan(&collective, &plan));
  const std::string title =
      c10::str("cgx:", name, " ", how, ", ", numel * kItemSizes[collective.dtype], " -> ",
               plan.payload_bytes, " bytes");
  static std::mutex mutex;
  static auto* titles = new std::set<std::string>;
  const std::lock_guard<std::mutex> lock(mutex);
  return titles->insert(title).first->c_str();
}

}  // namespace cgx::torch_ops
