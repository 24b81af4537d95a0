// The pool of codec threads: each task runs exactly once on any free thread, callers run
// concurrently, and exceptions reach the caller.
#include "base/thread_pool.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "ranks.h"

namespace {

using cgx::ThreadPool;

void test_each_task_runs_once() {
  auto& pool = ThreadPool::instance();
  CHECK(pool.size() == 4, "CGX_THREADS is 4, the pool has %d", pool.size());
  for (int count : {0, 1, 2, 3, 4, 5, 100}) {
    for (int round = 0; round < 200; ++round) {
      std::vector<int> done(count, 0);  // not atomic, since each element belongs to one task
      pool.for_each(count, [&](int i) { ++done[i]; });
      for (int i = 0; i < count; ++i) CHECK(done[i] == 1, "work(%d) ran %d times", i, done[i]);
    }
  }
}

void test_concurrent_callers() {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller)
    callers.emplace_back([] {
      for (int round = 0; round < 500; ++round) {
        std::atomic<int> sum{0};
        ThreadPool::instance().for_each(10, [&](int i) { sum += i; });
        CHECK(sum == 45, "the sum is %d", sum.load());
      }
    });
  for (auto& caller : callers) caller.join();
}

void test_threads_share() {
  // Two tasks that wait for each other can end only on two threads.
  std::atomic<int> here{0};
  ThreadPool::instance().for_each(2, [&](int) {
    ++here;
    while (here < 2) std::this_thread::yield();
  });
}

void test_throw() {
  for (int round = 0; round < 100; ++round) {
    bool caught = false;
    try {
      ThreadPool::instance().for_each(8, [](int i) {
        if (i == 5) throw std::runtime_error("five");
      });
    } catch (const std::runtime_error& error) {
      caught = std::string(error.what()) == "five";
    }
    CHECK(caught, "round %d", round);
  }
  test_each_task_runs_once();
}

}  // namespace

int main() {
  setenv("CGX_THREADS", "4", 1);
  test_each_task_runs_once();
  test_concurrent_callers();
  test_threads_share();
  test_throw();
  std::puts("passed");
}
