#include "base/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "base/cores.h"
#include "base/env.h"
#include "base/float_mode.h"

namespace cgx {
namespace {

constexpr int kMostThreads = 8;  // more would share one memory bus
constexpr auto kSpinTime = std::chrono::microseconds(50);

}  // namespace

ThreadPool& ThreadPool::instance() {
  static ThreadPool* pool =
      new ThreadPool(env_threads().value_or(std::min(cores_of_rank(), kMostThreads)));
  return *pool;
}

bool ThreadPool::try_share(int count, Call call, const void* work) {
  const std::unique_lock lock(busy_, std::try_to_lock);
  if (!lock || !start()) return false;
  call_ = call;
  work_ = work;
  count_ = count;
  next_ = 0;
  open_ = true;
  ++posted_;
  posted_.notify_all();
  take_part();
  // A thread registers in inside_ before it checks open_. Here open_ is cleared before inside_ is
  // checked. So a thread that is not seen here does not touch the job.
  open_ = false;
  while (inside_ != 0) std::this_thread::yield();
  if (auto failure = std::exchange(failure_, nullptr)) std::rethrow_exception(failure);
  return true;
}

// Returns false if no thread can be started.
bool ThreadPool::start() {
  if (!threads_.empty()) return true;
  try {
    for (int i = 1; i < size_; ++i) threads_.emplace_back([this] { serve(); });
  } catch (const std::system_error&) {  // continue with those that started
  }
  return !threads_.empty();
}

void ThreadPool::serve() {
  const FloatMode mode;
  for (uint32_t seen = 0;;) {
    const auto idle_since = std::chrono::steady_clock::now();
    while (posted_ == seen) {
      if (std::chrono::steady_clock::now() - idle_since < kSpinTime)
        std::this_thread::yield();
      else
        posted_.wait(seen);
    }
    seen = posted_;
    ++inside_;
    if (open_) take_part();
    --inside_;
  }
}

void ThreadPool::take_part() {
  for (int i = next_++; i < count_; i = next_++) {
    try {
      call_(work_, i);
    } catch (...) {
      const std::lock_guard lock(failing_);
      failure_ = std::current_exception();
    }
  }
}

}  // namespace cgx
