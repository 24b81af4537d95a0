#include "work.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "status.h"

namespace cgx::torch_ops {

Work::Work(cgx_request_t* request, at::Tensor input, at::Tensor output)
    : c10d::Work(/*rank=*/-1, c10d::OpType::ALLREDUCE),
      request_(request),
      input_(std::move(input)),
      output_(std::move(output)) {}

Work::~Work() {
  const std::lock_guard<std::mutex> lock(request_mutex_);
  join();
}

bool Work::isCompleted() {
  const std::unique_lock<std::mutex> lock(request_mutex_, std::try_to_lock);
  // Another thread is inside wait(): then it has not ended.
  return lock.owns_lock() && poll();
}

bool Work::isSuccess() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return completed_ && !exception_;
}

bool Work::wait(std::chrono::milliseconds timeout) {
  if (timeout > kNoTimeout) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    auto pause = std::chrono::microseconds(20);
    while (!isCompleted()) {
      if (std::chrono::steady_clock::now() >= deadline) {
        C10_THROW_ERROR(DistBackendError,
                        c10::str("cgx: the allreduce has not ended after the ", timeout.count(),
                                 " ms given to wait(); it goes on until its own deadline"));
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(1000));
    }
  }
  {
    const std::lock_guard<std::mutex> lock(request_mutex_);
    join();
  }
  if (const std::exception_ptr failure = exception()) std::rethrow_exception(failure);
  return true;
}

bool Work::poll() {
  if (request_ == nullptr) return true;
  int32_t done = 0;
  // A failure of the question itself is also an end; cgx_wait tells the reason.
  if (cgx_test(request_, &done) == CGX_OK && done == 0) return false;
  join();
  return true;
}

void Work::join() {
  if (request_ == nullptr) return;
  std::exception_ptr failure;
  try {
    check(cgx_wait(std::exchange(request_, nullptr)));
  } catch (...) {
    failure = std::current_exception();
  }
  input_.reset();
  finish(failure);
}

}  // namespace cgx::torch_ops
