// A CUDA event as an Event, and a CUDA stream as a Queue.
#pragma once

#include "cuda/driver.h"
#include "device/queue.h"

namespace cgx::device::cuda {

class CudaDevice;

class CudaEvent : public Event {
 public:
  explicit CudaEvent(const CudaDevice& device);
  ~CudaEvent() override;
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  void synchronize() override;

  cudaEvent_t event() const { return event_; }

 private:
  const CudaDevice& device_;
  cudaEvent_t event_ = nullptr;
};

class CudaQueue : public Queue {
 public:
  // Creates a stream: not synchronized with the default stream, and of the highest priority, since
  // peers wait for its work, too.
  explicit CudaQueue(const CudaDevice& device);
  // Wraps the caller's stream: any cudaStream_t of the device, including NULL, cudaStreamLegacy and
  // cudaStreamPerThread. It must outlive the queue.
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
  // `work` is not called if the device has failed.
  void call(void (*work)(void* context), void* context) override;
  // Compares as stream memory operations do, modulo 2^32, so words may wrap around.
  void wait_for(const uint32_t* word, uint32_t value) override;
  void record(Event& event) override;
  void wait_for(const Event& event) override;
  bool idle() override;
  void synchronize() override;

  cudaStream_t stream() const { return stream_; }

 private:
  const CudaDevice& device_;
  const bool own_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace cgx::device::cuda
