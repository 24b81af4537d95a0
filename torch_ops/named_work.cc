#include "named_work.h"

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <utility>

#include "cgx/cgx.h"
#include "status.h"

namespace cgx::torch_ops {
namespace {

// Over shared memory the loss of a rank is detected within a second.
constexpr double kSearchSeconds = 2.0;

class NamedWork final : public c10d::Work {
 public:
  NamedWork(c10::intrusive_ptr<c10d::Work> work, Rename rename,
            std::function<void(const c10d::Work&)> ended)
      : c10d::Work(/*rank=*/-1, work->retrieveOpType()),
        work_(std::move(work)),
        rename_(std::move(rename)),
        ended_(std::move(ended)) {}

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override {
    const std::exception_ptr failure = work_->exception();
    return failure ? rename_(failure) : nullptr;
  }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  void synchronize() override { work_->synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override {
    bool success = false;
    std::exception_ptr failure;
    try {
      success = work_->wait(timeout);
    } catch (...) {
      failure = std::current_exception();
    }
    if (!success) {
      if (const std::exception_ptr renamed = rename_(failure)) std::rethrow_exception(renamed);
    } else if (ended_) {
      std::call_once(once_, [this] { ended_(*work_); });
    }
    return success;
  }
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const auto future = work_->getFuture();
    const auto name = [rename = rename_](c10::ivalue::Future& ended) {
      if (ended.hasError()) std::rethrow_exception(rename(ended.exception_ptr()));
      return ended.value();
    };
    return future->then(name, future->elementType());
  }
  float getDuration() const override { return work_->getDuration(); }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
  const Rename rename_;
  const std::function<void(const c10d::Work&)> ended_;
  std::once_flag once_;
};

}  // namespace

std::exception_ptr LossFinder::named(std::exception_ptr failure) const {
  if (!failure) return nullptr;
  try {
    std::rethrow_exception(failure);
  } catch (const c10::Error&) {
    return failure;
  } catch (const std::exception& error) {
    if (cgx_comm_find_lost(comm_, kSearchSeconds) != CGX_PEER_FAILED) return failure;
    const std::string text = c10::str(cgx_last_error(), " [", call_, ": ", error.what(), "]");
    return std::make_exception_ptr(
        RankFailure(CGX_PEER_FAILED, {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text));
  } catch (...) {
    return failure;
  }
}

c10::intrusive_ptr<c10d::Work> with_named_failures(c10::intrusive_ptr<c10d::Work> work,
                                                   Rename rename,
                                                   std::function<void(const c10d::Work&)> ended) {
  return c10::make_intrusive<NamedWork>(std::move(work), std::move(rename), std::move(ended));
}

}  // namespace cgx::torch_ops
