// The threads of this process that encode and decode: one pool, with as many threads as this rank
// has cores, or CGX_THREADS. Results do not depend on their number.
//
// Jobs take tens of microseconds and follow each other closely, so idle threads poll briefly before
// they sleep. A caller that finds the pool busy runs its job alone.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace cgx {

class ThreadPool {
 public:
  // The process's pool. Threads start on first use and are never joined, because others may still
  // compute while the process exits.
  static ThreadPool& instance();

  // Threads that work on a job, including the caller.
  int size() const { return size_; }

  // Calls work(0) ... work(count - 1), in any order and on any thread, and returns when all have
  // returned. Rethrows an exception of one of them.
  template <typename Work>
  void for_each(int count, const Work& work) {
    if (count > 1 && size_ > 1 && try_share(count, &call<Work>, &work)) return;
    for (int i = 0; i < count; ++i) work(i);
  }

 private:
  using Call = void (*)(const void* work, int i);
  template <typename Work>
  static void call(const void* work, int i) {
    (*static_cast<const Work*>(work))(i);
  }

  explicit ThreadPool(int size) : size_(size) {}
  bool try_share(int count, Call call, const void* work);
  bool start();
  void serve();
  void take_part();

  const int size_;
  std::mutex busy_;  // held by the owner of the current job
  std::vector<std::thread> threads_;

  // The current job.
  Call call_ = nullptr;
  const void* work_ = nullptr;
  int count_ = 0;
  std::atomic<int> next_{0};
  std::atomic<bool> open_{false};  // threads may still join
  std::atomic<int> inside_{0};     // threads that have joined
  std::mutex failing_;
  std::exception_ptr failure_;
  std::atomic<uint32_t> posted_{0};  // number of jobs so far; idle threads wait on it
};

}  // namespace cgx
