#include "cuda/queue.h"

#include "cuda/device.h"
#include "kernel/cuda/kernels.h"

namespace cgx::device::cuda {

CudaEvent::CudaEvent(const CudaDevice& device) : device_(device) {
  const Current current(device.context());
  check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "creating an event on ",
        device.name());
}

CudaEvent::~CudaEvent() {
  device_.release([this] { cudaEventDestroy(event_); });
}

void CudaEvent::synchronize() {
  const Current current(device_.context());
  check(cudaEventSynchronize(event_), "cudaEventSynchronize on ", device_.name());
}

CudaQueue::CudaQueue(const CudaDevice& device) : device_(device), own_(true) {
  const Current current(device.context());
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest),
        "creating a stream on ", device.name());
}

CudaQueue::CudaQueue(const CudaDevice& device, cudaStream_t stream)
    : device_(device), own_(false), stream_(stream) {}

// Does not wait for the stream or affect its work.
CudaQueue::~CudaQueue() {
  if (own_) device_.release([this] { cudaStreamDestroy(stream_); });
}

void CudaQueue::encode(const Encode& launch) {
  const Current current(device_.context());
  cuda::launch(launch, device_.processors(), stream_);
}

void CudaQueue::reduce(const Reduce& launch) {
  const Current current(device_.context());
  cuda::launch(launch, device_.processors(), stream_);
}

void CudaQueue::decode(const Decode& launch) {
  const Current current(device_.context());
  cuda::launch(launch, device_.processors(), stream_);
}

void CudaQueue::signal(const Signals& launch) {
  const Current current(device_.context());
  cuda::launch(launch, stream_);
}

void CudaQueue::copy(void* to, const void* from, size_t bytes) {
  const Current current(device_.context());
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync of ", bytes,
        " bytes on ", device_.name());
}

void CudaQueue::clear(void* at, size_t bytes) {
  const Current current(device_.context());
  check(cudaMemsetAsync(at, 0, bytes, stream_), "cudaMemsetAsync of ", bytes, " bytes on ",
        device_.name());
}

void CudaQueue::call(void (*work)(void* context), void* context) {
  const Current current(device_.context());
  check(cudaLaunchHostFunc(stream_, work, context), "cudaLaunchHostFunc on ", device_.name());
}

void CudaQueue::wait_for(const uint32_t* word, uint32_t value) {
  const Current current(device_.context());
  check(driver().wait_value(stream_, reinterpret_cast<CUdeviceptr>(word), value,
                            CU_STREAM_WAIT_VALUE_GEQ),
        "cuStreamWaitValue32 on ", device_.name());
}

void CudaQueue::record(Event& event) {
  const Current current(device_.context());
  check(cudaEventRecord(static_cast<CudaEvent&>(event).event(), stream_), "cudaEventRecord on ",
        device_.name());
}

void CudaQueue::wait_for(const Event& event) {
  const Current current(device_.context());
  check(cudaStreamWaitEvent(stream_, static_cast<const CudaEvent&>(event).event(),
                            cudaEventWaitDefault),
        "cudaStreamWaitEvent on ", device_.name());
}

bool CudaQueue::idle() {
  const Current current(device_.context());
  const cudaError_t error = cudaStreamQuery(stream_);
  if (error == cudaErrorNotReady) {
    cudaGetLastError();  // it counts as an error
    return false;
  }
  check(error, "cudaStreamQuery on ", device_.name());
  return true;
}

void CudaQueue::synchronize() {
  const Current current(device_.context());
  check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize on ", device_.name());
}

}  // namespace cgx::device::cuda
