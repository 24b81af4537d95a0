// A collective in flight, as torch.distributed sees it.
#ifndef CGX_TORCH_OPS_WORK_H_
#define CGX_TORCH_OPS_WORK_H_

#include <ATen/core/Tensor.h>

#include <chrono>
#include <exception>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "cgx/cgx.h"

namespace cgx::torch_ops {

// Owns the request and keeps its buffers alive until the collective has ended. Whoever waits drives
// the collective's progress, so wait() goes to the core and not to a condition variable.
class Work final : public c10d::Work {
 public:
  // Reduces `input` into `output` (they may be one tensor; both contiguous). Takes over `request`,
  // which the core has started on these buffers.
  Work(cgx_request_t* request, at::Tensor input, at::Tensor output);
  // Waits if nobody did: memory that the core still writes must not be freed. The collective's
  // deadline bounds it.
  ~Work() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  // Throws what the collective failed with. A timeout shorter than the collective's own throws
  // DistBackendError and leaves the collective running.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  std::vector<at::Tensor> result() override { return {output_}; }

 private:
  // Both need request_mutex_ held. poll() tells whether the collective has ended; join() ends it.
  bool poll();
  void join();

  std::mutex request_mutex_;  // held by the one thread that is inside the core with request_
  cgx_request_t* request_;    // null once the collective has ended
  at::Tensor input_;
  at::Tensor output_;
};

}  // namespace cgx::torch_ops

#endif  // CGX_TORCH_OPS_WORK_H_
