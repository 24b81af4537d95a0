#include "averages.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <mutex>
#include <utility>

namespace cgx::torch_ops {
namespace {

// Divides once, whoever comes first: a waiter, or what the sum's future calls.
class Division {
 public:
  Division(std::vector<at::Tensor> tensors, int64_t divisor)
      : tensors_(std::move(tensors)), divisor_(divisor) {}

  void run() {
    std::call_once(done_, [this] {
      const at::AutoDispatchBelowADInplaceOrView no_autograd;
      for (at::Tensor& tensor : tensors_) {
        if (at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {
          tensor.div_(divisor_, "trunc");
        } else {
          tensor.div_(divisor_);
        }
      }
    });
  }

 private:
  std::once_flag done_;
  std::vector<at::Tensor> tensors_;
  const int64_t divisor_;
};

// Some of gloo's works have no future, and write their results in wait().
class Averaged final : public c10d::Work {
 public:
  Averaged(c10::intrusive_ptr<c10d::Work> sum, std::vector<at::Tensor> results, int64_t divisor)
      : c10d::Work(/*rank=*/-1, sum->retrieveOpType()),
        sum_(std::move(sum)),
        division_(std::make_shared<Division>(std::move(results), divisor)) {}

  bool isCompleted() override {
    if (!sum_->isCompleted()) return false;
    if (sum_->isSuccess()) wait(kNoTimeout);
    return true;
  }
  bool isSuccess() const override { return sum_->isSuccess(); }
  std::exception_ptr exception() const override { return sum_->exception(); }
  bool wait(std::chrono::milliseconds timeout) override {
    sum_->wait(timeout);  // throws what it failed with
    division_->run();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return sum_->result(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const auto divide = [division = division_](c10::ivalue::Future& ended) {
      c10::IValue value = ended.value();  // throws what the sum failed with
      division->run();
      return value;
    };
    const auto future = sum_->getFuture();
    return future->then(divide, future->elementType());
  }

 private:
  const c10::intrusive_ptr<c10d::Work> sum_;
  const std::shared_ptr<Division> division_;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> averaged(c10::intrusive_ptr<c10d::Work> sum,
                                        std::vector<at::Tensor> results, int64_t divisor) {
  return c10::make_intrusive<Averaged>(std::move(sum), std::move(results), divisor);
}

}  // namespace cgx::torch_ops
