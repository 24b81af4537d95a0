#include "joint_work.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace cgx::torch_ops {
namespace {

using WorkRef = c10::intrusive_ptr<c10d::Work>;

// Returns a function that calls another one until that succeeds, and then does nothing.
std::function<void()> once(std::function<void()> call) {
  return [flag = std::make_shared<std::once_flag>(), call = std::move(call)] {
    std::call_once(*flag, call);
  };
}

// Appends the tensors of a future's value: a list, or a list of lists.
void append_tensors(const c10::IValue& value, c10::List<at::Tensor>* tensors) {
  if (value.isTensor()) tensors->push_back(value.toTensor());
  if (!value.isList()) return;
  for (const c10::IValue& element : value.toListRef()) append_tensors(element, tensors);
}

// Joins works. `then`, if given, is called once after all have succeeded, by a waiter or by the
// future's callback. `results`, if given, replace the tensors of the works. Some gloo works have no
// future, and write their results in every call of wait().
class JointWork final : public c10d::Work {
 public:
  JointWork(std::vector<WorkRef> works, c10d::OpType type, std::function<void()> then = nullptr,
            std::vector<at::Tensor> results = {})
      : c10d::Work(/*rank=*/-1, type),
        works_(std::move(works)),
        then_(then ? once(std::move(then)) : nullptr),
        results_(std::move(results)) {}

  bool isCompleted() override {
    for (const auto& work : works_) {
      if (!work->isCompleted()) return false;
    }
    if (then_ && isSuccess()) wait(kNoTimeout);
    return true;
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](auto& work) { return work->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const auto& work : works_) {
      if (const std::exception_ptr failure = work->exception()) return failure;
    }
    return nullptr;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    const auto wait_for_all = [&] {
      for (const auto& work : works_) work->wait(timeout);  // throws the failure
    };
    if (!then_) {
      wait_for_all();  // in each call, because it may order CUDA streams
    } else {
      std::call_once(waited_, [&] {
        wait_for_all();
        then_();
      });
    }
    return true;
  }
  void synchronize() override {
    if (then_) wait(kNoTimeout);  // gloo's synchronize() does not wait
    for (const auto& work : works_) work->synchronize();
  }
  std::vector<at::Tensor> result() override {
    if (!results_.empty()) return results_;
    std::vector<at::Tensor> all;
    for (const auto& work : works_) {
      for (at::Tensor& tensor : work->result()) all.push_back(std::move(tensor));
    }
    return all;
  }
  // The future's value is the list of result().
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    using Future = c10::intrusive_ptr<c10::ivalue::Future>;
    const auto tensors = c10::ListType::create(c10::TensorType::get());
    c10::List<Future> futures(c10::FutureType::create(tensors));
    for (const auto& work : works_) futures.push_back(work->getFuture());
    const auto collect = [futures, then = then_, results = results_](c10::ivalue::Future& all) {
      all.value();  // throws the first failure
      if (then) then();
      c10::List<at::Tensor> values(results);
      if (!results.empty()) return c10::IValue(values);
      for (const Future& future : futures) append_tensors(future->value(), &values);
      return c10::IValue(values);
    };
    return c10::collectAll(futures)->then(collect, tensors);
  }

 private:
  const std::vector<WorkRef> works_;
  const std::function<void()> then_;
  const std::vector<at::Tensor> results_;
  std::once_flag waited_;  // set by the first wait() that does not throw, if there is a `then`
};

}  // namespace

WorkRef join_works(std::vector<WorkRef> works) {
  return c10::make_intrusive<JointWork>(std::move(works), c10d::OpType::COALESCED);
}

WorkRef averaged(WorkRef sum, std::vector<at::Tensor> results, int64_t divisor) {
  auto divide = [results = std::move(results), divisor] {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    for (const at::Tensor& tensor : results) {
      if (at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {
        tensor.div_(divisor, "trunc");
      } else {
        tensor.div_(divisor);
      }
    }
  };
  const c10d::OpType type = sum->retrieveOpType();
  return c10::make_intrusive<JointWork>(std::vector<WorkRef>{std::move(sum)}, type,
                                        std::move(divide));
}

WorkRef copied_back(WorkRef work, std::vector<at::Tensor> from, std::vector<at::Tensor> to) {
  const c10d::OpType type = work->retrieveOpType();
  auto copy = [from = std::move(from), to] {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    for (size_t i = 0; i < to.size(); ++i) {
      if (!to[i].is_same(from[i])) to[i].copy_(from[i]);
    }
  };
  auto joint = c10::make_intrusive<JointWork>(std::vector<WorkRef>{std::move(work)}, type,
                                              std::move(copy), std::move(to));
  try {
    (void)joint->getFuture();    // copies when the work has ended, even if the caller drops it
  } catch (const c10::Error&) {  // it has no future
  }
  return joint;
}

}  // namespace cgx::torch_ops
