#include "joint_work.h"

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

namespace cgx::torch_ops {
namespace {

using WorkRef = c10::intrusive_ptr<c10d::Work>;

// The tensors of a future's value: a list, or a list of lists.
void append_tensors(const c10::IValue& value, c10::List<at::Tensor>* tensors) {
  if (value.isTensor()) tensors->push_back(value.toTensor());
  if (!value.isList()) return;
  for (const c10::IValue& element : value.toListRef()) append_tensors(element, tensors);
}

class JointWork final : public c10d::Work {
 public:
  explicit JointWork(std::vector<WorkRef> works)
      : c10d::Work(/*rank=*/-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(),
                       [](auto& work) { return work->isCompleted(); });
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
    for (const auto& work : works_) work->wait(timeout);
    return true;
  }
  void synchronize() override {
    for (const auto& work : works_) work->synchronize();
  }
  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> all;
    for (const auto& work : works_) {
      for (at::Tensor& tensor : work->result()) all.push_back(std::move(tensor));
    }
    return all;
  }
  // Of the list of all works' tensors.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    using Future = c10::intrusive_ptr<c10::ivalue::Future>;
    const auto tensors = c10::ListType::create(c10::TensorType::get());
    c10::List<Future> futures(c10::FutureType::create(tensors));
    for (const auto& work : works_) futures.push_back(work->getFuture());
    const auto collect = [futures](c10::ivalue::Future& all) {
      all.value();  // throws what one of them failed with
      c10::List<at::Tensor> values;
      for (const Future& future : futures) append_tensors(future->value(), &values);
      return c10::IValue(values);
    };
    return c10::collectAll(futures)->then(collect, tensors);
  }

 private:
  const std::vector<WorkRef> works_;
};

}  // namespace

WorkRef join_works(std::vector<WorkRef> works) {
  return c10::make_intrusive<JointWork>(std::move(works));
}

}  // namespace cgx::torch_ops
