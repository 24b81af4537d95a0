// A CUDA stream as a Queue.
#pragma once

#include "cuda/driver.h"
#include "device/queue.h"

namespace cgx::device::cuda {

class CudaDevice;

class CudaQueue : public Queue {
 public:
  // A stream of our own: not ordered with the default stream, of the greatest priority, since what
  // waits for it is waited for by peers too.
  explicit CudaQueue(const CudaDevice& device);
  // The caller's: any cudaStream_t of the device, NULL, cudaStreamLegacy and cudaStreamPerThread
  // among them. It must outlive the queue.
  CudaQueue(const CudaDevice& device, cudaStream_t stream);
  ~CudaQueue() override;
  CudaQueue(const CudaQueue&) = delete;
  CudaQueue& operator=(const CudaQueue&) = delete;

  void encode(const Encode& launch) override;
  void reduce(const Reduce& launch) override;
  void decode(const Decode& launch) override;
  void signal(const Signals& launch) override;
  void copy(void* to, const void* from, size_t bytes) override;
  void clear(void* at, size_t bytes) override;
  // `work` is not called if the device has failed by then.
  void call(void (*work)(void* context), void* context) override;
  // Compares as stream memory operations do, in a circle: words may wrap around.
  void wait_for(const uint32_t* word, uint32_t value) override;
  void follow(Queue& other) override;
  bool idle() override;
  void synchronize() override;

  cudaStream_t stream() const { return stream_; }

 private:
  const CudaDevice& device_;
  const bool own_;
  cudaStream_t stream_ = nullptr;
  // Marks the end of what this queue follows; made when first needed. One is enough: a wait is for
  // the record that it saw, whatever is recorded later.
  cudaEvent_t mark_ = nullptr;
};

}  // namespace cgx::device::cuda
