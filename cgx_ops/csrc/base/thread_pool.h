// The threads of this process that share the codec's work: one pool, of as many threads as this
// rank has cores (CGX_THREADS says otherwise). What they do does not depend on how many
// they are.
//
// Jobs are tens of microseconds long and follow each other closely, so idle threads look for the
// next one for a moment before they sleep. Who finds the pool at work for somebody else does its
// job alone.
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
  // The process's. Its threads start when they are first needed and are never joined: other
  // threads may still compute while the process ends.
  static ThreadPool& instance();

  // Threads that work on one job, the caller included.
  int size() const { return size_; }

  // Calls work(0) ... work(count - 1), in any order, on any of the threads, and returns when all
  // have returned; throws what one of them has thrown.
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
  std::mutex busy_;  // held by whoever's job it is
  std::vector<std::thread> threads_;

  // The job.
  Call call_ = nullptr;
  const void* work_ = nullptr;
  int count_ = 0;
  std::atomic<int> next_{0};
  std::atomic<bool> open_{false};  // threads may still join in
  std::atomic<int> inside_{0};     // those that have
  std::mutex failing_;
  std::exception_ptr failure_;
  std::atomic<uint32_t> posted_{0};  // jobs so far: what idle threads wait for
};

}  // namespace cgx
