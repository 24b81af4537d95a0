// A pool of threads that complete XLA futures.
//
// XLA resumes a program inline, on the thread that completes the future it waits for, and the
// resumed program may block there (an XLA collective waits for the other devices). So no thread may
// complete two futures while the first completion is still running, and the core's progress thread
// may complete none. The pool therefore starts a thread whenever no idle one is left for the work
// at hand; threads that stay idle leave.
#ifndef CGX_XLA_FFI_COMPLETION_H_
#define CGX_XLA_FFI_COMPLETION_H_

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>

namespace cgx::xla {

class CompletionPool {
 public:
  // Lives until the process ends: XLA may still be running when static objects are destroyed.
  static CompletionPool& Get();

  // Runs `work` soon, on a thread that has nothing else to do. Never blocks.
  void Run(std::function<void()> work);

 private:
  void Loop();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  size_t idle_ = 0;  // threads that wait in wake_, counted until they hold the mutex again
};

}  // namespace cgx::xla

#endif  // CGX_XLA_FFI_COMPLETION_H_
