// A thread pool that delivers the completions of collectives to frameworks.
//
// A framework may block in a completion: XLA continues a program on the thread that completes its
// future, and torch runs a future's callbacks there. Both may wait for other collectives. So
// completions must not run on the core's progress thread, and a thread must not start a second
// completion inside a first. The pool therefore starts a new thread whenever no idle thread is
// left. Idle threads exit after a while.
//
// Header only: each binding has its own pool.
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
  // Returns the pool, which is never destroyed: frameworks may complete work while static objects
  // are destroyed. The first call starts a thread, and throws std::system_error if it cannot. Make
  // it before starting collectives that the pool will complete.
  static CompletionPool& get() {
    static CompletionPool* pool = [] {
      auto* made = new CompletionPool;
      std::thread([made] { made->loop(/*stay=*/true); }).detach();
      return made;
    }();
    return *pool;
  }

  // Waits until all work is done, or the time has passed.
  void drain(std::chrono::duration<double> at_most) {
    std::unique_lock lock(mutex_);
    ended_.wait_for(lock, at_most, [this] { return queue_.empty() && busy_ == 0; });
  }

  // Runs `work` soon on an idle thread. If no thread can be started, the work waits for an existing
  // one; the first thread never exits. If even the queue cannot grow, the work runs here, and may
  // block: that is better than never.
  void run(std::function<void()> work) noexcept {
    std::unique_lock lock(mutex_);
    try {
      queue_.push_back(std::move(work));
    } catch (const std::bad_alloc&) {  // push_back failed before the move
      lock.unlock();
      return work();
    }
    // Each idle thread takes one item; any further item needs a new thread.
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
      }  // destroys the work, and what it captured, without holding the mutex
      lock.lock();
      --busy_;
      ended_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable ended_;
  std::deque<std::function<void()>> queue_;
  size_t idle_ = 0;  // threads waiting in wake_, counted until they hold the mutex again
  size_t busy_ = 0;  // threads that run work
};

}  // namespace cgx

#endif  // CGX_COMPLETION_POOL_H_
