#include "cuda.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/version.h>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "status.h"

namespace cgx::torch_ops {
namespace {

using c10::ivalue::Future;

c10::impl::VirtualGuardImpl cuda() { return c10::impl::VirtualGuardImpl(at::kCUDA); }

// One stream per communicator and device. Groups must not wait for each other, since ranks may use
// them in different orders.
struct SideStreams {
  std::mutex mutex;
  std::map<std::pair<int32_t, c10::DeviceIndex>, c10::Stream> by_comm;
};

SideStreams& side_streams() {
  static auto* streams = new SideStreams;
  return *streams;
}

c10::Stream side_stream(int32_t comm, at::Device device) {
  auto& [mutex, by_comm] = side_streams();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::make_pair(comm, device.index());
  const auto found = by_comm.find(key);
  if (found != by_comm.end()) return found->second;
  return by_comm.emplace(key, cuda().getStreamFromGlobalPool(device)).first->second;
}

// Without elements there is no address that identifies the device. All ranks skip such calls. With
// splits, other ranks may have elements.
bool empty(const cgx_collective_t& collective) {
  if (collective.input_splits) return false;
  const cgx_segment_t* const segments = collective.segments;
  return std::all_of(segments, segments + collective.num_segments,
                     [](const cgx_segment_t& segment) { return segment.numel == 0; });
}

void enqueue_on(const c10::Stream& stream, const cgx_collective_t& collective) {
  if (empty(collective)) return;
  const c10::DeviceGuard guard(stream.device());
  cgx_collective_t call = collective;
  call.device = CGX_CUDA;
  call.stream = stream.native_handle();
  check(cgx_enqueue(&call));
}

// Returns the known failure of the communicator's GPU collectives, or null.
std::exception_ptr failure_of(int32_t comm) {
  const cgx_status_t status = cgx_comm_check(comm, /*finish=*/0);
  // CGX_CLOSED: it was closed without a failure.
  if (status == CGX_OK || status == CGX_CLOSED) return nullptr;
  try {
    check(status);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

// The Work of a CUDA collective.
//
// On a side stream, the collective's memory was allocated for another stream. That stream's next
// kernels could reuse it once it is freed. So the Work owns the memory until a caller waits:
// later work of that stream then comes after the collective. The alternative, record_stream, would
// delay the reuse of every call's memory until the host sees the end, and prevent reuse in CUDA
// graphs. It is used only if no wait orders the streams: the Work is dropped, or a third stream
// waits.
class CudaWork final : public c10d::Work {
 public:
  CudaWork(Buffers buffers, c10d::OpType type, const char* title, int32_t comm, c10::Stream stream)
      : c10d::Work(/*rank=*/-1, type, title, std::vector<at::Tensor>{buffers.input}),
        comm_(comm),
        stream_(stream),
        caller_(cuda().getStream(stream.device())),
        results_(buffers.results.empty() ? std::vector<at::Tensor>{buffers.output}
                                         : buffers.results),
        buffers_(std::move(buffers)),
        end_(at::kCUDA),
        future_(c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()),
                                            std::vector<c10::Device>{stream.device()})) {}

  ~CudaWork() override { release(/*ordered=*/false); }

  // The collective's stream must be current.
  void put(const cgx_collective_t& collective) {
    enqueue_on(stream_, collective);
    if (buffers_.deliver) buffers_.deliver();
    end_.record(stream_);
    future_->markCompleted(c10::IValue(results_));  // CUDA futures synchronize streams, so this may
                                                    // complete before the collective ends
    if (recordFunctionEndCallback_) std::exchange(recordFunctionEndCallback_, nullptr)();
  }

  bool isCompleted() override { return end_.query(); }

  bool isSuccess() const override { return end_.query() && !exception(); }

  std::exception_ptr exception() const override {
    return failure(end_.query());  // query first: a failure is recorded before the end
  }

  // Blocks the current stream and, if there is a timeout, the host. Throws if a failure is known.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    const c10::Stream current = cuda().getStream(stream_.device());
    end_.block(current);
    release(/*ordered=*/current == caller_);
    if (timeout > kNoTimeout) wait_on_host(timeout);
    if (const std::exception_ptr known = failure(/*ended=*/false)) std::rethrow_exception(known);
    return true;
  }

  void synchronize() override { wait(); }
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<Future> getFuture() override { return future_; }

 private:
  void wait_on_host(std::chrono::milliseconds timeout) const {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (!end_.query()) {
      if (std::chrono::steady_clock::now() >= deadline) {
        C10_THROW_ERROR(DistBackendError,
                        c10::str("cgx: the collective has not ended after the ", timeout.count(),
                                 " ms given to wait(); it continues until its own deadline"));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    if (const std::exception_ptr known = failure(/*ended=*/true)) std::rethrow_exception(known);
  }

  // Checks again unless the end was seen before: later failures belong to later collectives.
  std::exception_ptr failure(bool ended) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!settled_) failure_ = failure_of(comm_);
    settled_ = settled_ || ended || failure_;
    return failure_;
  }

  // Releases the memory. `ordered`: its stream waits for the collective.
  void release(bool ordered) {
    Buffers buffers;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      buffers = std::exchange(buffers_, Buffers{});
    }
    if (ordered || stream_ == caller_) return;
    std::vector<at::Tensor> used = buffers.results;
    used.insert(used.end(), {buffers.input, buffers.output, buffers.seed});
    used.insert(used.end(), buffers.residuals.begin(), buffers.residuals.end());
    for (const at::Tensor& tensor : used) {
      if (tensor.defined()) cuda().recordDataPtrOnStream(tensor.storage().data_ptr(), stream_);
    }
  }

  const int32_t comm_;
  const c10::Stream stream_, caller_;  // where it runs; whose memory it uses
  const std::vector<at::Tensor> results_;
  Buffers buffers_;
  c10::Event end_;
  const c10::intrusive_ptr<Future> future_;
  mutable bool settled_ = false;  // whether failure_ is final
  mutable std::exception_ptr failure_;
};

}  // namespace

void enqueue(const cgx_collective_t& collective, at::Device device) {
  enqueue_on(cuda().getStream(device), collective);
}

c10::intrusive_ptr<c10d::Work> start_cuda(const cgx_collective_t& collective, Buffers buffers,
                                          c10d::OpType type, bool asynchronous) {
  const at::Device device = buffers.output.device();
  const char* title = at::hasCallbacks() ? profile_title(collective) : nullptr;
  const c10::Stream current = cuda().getStream(device);
  const c10::Stream stream = asynchronous ? side_stream(collective.comm, device) : current;
  auto work =
      c10::make_intrusive<CudaWork>(std::move(buffers), type, title, collective.comm, stream);
  const c10::StreamGuard guard(stream);
  if (stream != current) {
    c10::Event ready(at::kCUDA);
    ready.record(current);
    ready.block(stream);
  }
  work->put(collective);
  return work;
}

void forget_streams(int32_t comm) {
  auto& [mutex, by_comm] = side_streams();
  const std::lock_guard<std::mutex> lock(mutex);
  std::erase_if(by_comm, [comm](const auto& each) { return each.first.first == comm; });
}

CurrentStream::CurrentStream(at::Device device)
    : guard(device.is_cuda() ? std::optional(device) : std::nullopt) {
  if (device.is_cuda()) handle = cuda().getStream(device).native_handle();
}

bool capturing(at::Device device) {
  const c10::DeviceGuard guard(device);
  int32_t recording = 0;
  check(cgx_stream_recording(cuda().getStream(device).native_handle(), &recording));
  return recording != 0;
}

}  // namespace cgx::torch_ops
