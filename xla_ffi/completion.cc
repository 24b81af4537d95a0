#include "completion.h"

#include <chrono>
#include <thread>
#include <utility>

namespace cgx::xla {
namespace {

constexpr auto kIdleTime = std::chrono::seconds(30);

}  // namespace

CompletionPool& CompletionPool::Get() {
  static CompletionPool* pool = new CompletionPool;
  return *pool;
}

void CompletionPool::Run(std::function<void()> work) {
  std::lock_guard lock(mutex_);
  queue_.push_back(std::move(work));
  // Every idle thread takes one item, so items beyond them need threads of their own.
  if (queue_.size() > idle_) {
    std::thread([this] { Loop(); }).detach();
  } else {
    wake_.notify_one();
  }
}

void CompletionPool::Loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (queue_.empty()) {
      ++idle_;
      wake_.wait_for(lock, kIdleTime, [this] { return !queue_.empty(); });
      --idle_;
      if (queue_.empty()) return;
    }
    {
      std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work();
    }  // what the work holds is released without the mutex
    lock.lock();
  }
}

}  // namespace cgx::xla
