// A pool of threads that tell frameworks of collectives that ended.
//
// What a framework does then may block: XLA resumes a program inline, on the thread that completes
// its future, and torch runs the callbacks of a future there, which may wait for other collectives.
// So the core's progress thread, which calls back when a collective ends, may do none of it, and no
// thread may take up a second completion while it is inside a first. The pool therefore starts a
// thread whenever no idle one is left for the work at hand; threads that stay idle leave.
//
// Header only: each binding has a pool of its own.
#ifndef CGX_COMPLETION_POOL_H_
#define CGX_COMPLETION_POOL_H_

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

namespace cgx {

class CompletionPool {
 public:
  // Lives until the process ends: frameworks may still run when static objects are destroyed. The
  // first call makes its first thread and throws std::system_error where it cannot: so call it
  // before anything starts that the pool is to complete.
  static CompletionPool& get() {
    static CompletionPool* pool = [] {
      auto* made = new CompletionPool;
      std::thread([made] { made->loop(/*stay=*/true); }).detach();
      return made;
    }();
    return *pool;
  }

  // Waits until nothing is left to do, or the time has passed.
  void drain(std::chrono::duration<double> at_most) {
    std::unique_lock lock(mutex_);
    ended_.wait_for(lock, at_most, [this] { return queue_.empty() && busy_ == 0; });
  }

  // Runs `work` soon, on a thread that has nothing else to do. Never throws. Where no thread can be
  // had, work waits for one of those there are, of which one never leaves; where not even the queue
  // gets memory, work is done here and now, and may block: that is better than never.
  void run(std::function<void()> work) noexcept {
    std::unique_lock lock(mutex_);
    try {
      queue_.push_back(std::move(work));
    } catch (const std::bad_alloc&) {  // then work was not moved
      lock.unlock();
      return work();
    }
    // Every idle thread takes one item, so items beyond them need threads of their own.
    if (queue_.size() <= idle_) {
      wake_.notify_one();
      return;
    }
    try {
      std::thread([this] { loop(/*stay=*/false); }).detach();
    } catch (const std::system_error&) {
      wake_.notify_one();
    }
  }

 private:
  static constexpr auto kIdleTime = std::chrono::seconds(30);

  void loop(bool stay) {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (queue_.empty()) {
        ++idle_;
        wake_.wait_for(lock, kIdleTime, [this] { return !queue_.empty(); });
        --idle_;
        if (queue_.empty() && stay) continue;
        if (queue_.empty()) return;
      }
      {
        std::function<void()> work = std::move(queue_.front());
        queue_.pop_front();
        ++busy_;
        lock.unlock();
        work();
      }  // what the work holds is released without the mutex
      lock.lock();
      --busy_;
      ended_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable ended_;
  std::deque<std::function<void()>> queue_;
  size_t idle_ = 0;  // threads that wait in wake_, counted until they hold the mutex again
  size_t busy_ = 0;  // threads that do something
};

}  // namespace cgx

#endif  // CGX_COMPLETION_POOL_H_
