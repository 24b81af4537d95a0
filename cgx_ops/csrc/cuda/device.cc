#include "cuda/device.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>

#include "cuda/nccl.h"
#include "cuda/sharing.h"
#include "kernel/cuda/kernels.h"
#include "transport/mpi.h"

namespace cgx::device::cuda {
namespace {

constexpr int kOldestMajor = 8;  // the oldest compute capability that kernels are built for

// The kind of memory at an address, as CUDA reports it.
enum class Kind { kUnknown, kPinned, kDevice };
struct Location {
  Kind kind;
  int ordinal;  // for kDevice
};

// Uses the driver, because cudaPointerGetAttributes would start a context on this thread's current
// device. nullopt: this thread has no context, so the driver recognizes no address.
std::optional<Location> locate(const void* address) {
  unsigned int type = 0, managed = 0;
  int ordinal = -1;
  CUpointer_attribute asked[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                                 CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
  void* answers[] = {&type, &managed, &ordinal};
  const CUresult result =
      driver().pointer_attributes(3, asked, answers, reinterpret_cast<CUdeviceptr>(address));
  if (result == CUDA_ERROR_INVALID_CONTEXT) return std::nullopt;
  if (result == CUDA_ERROR_INVALID_VALUE)
    return Location{Kind::kUnknown, -1};  // the driver's result for memory that it has not seen
  check(result, "cuPointerGetAttributes");
  if (type == CU_MEMORYTYPE_DEVICE || managed) return Location{Kind::kDevice, ordinal};
  return Location{type == CU_MEMORYTYPE_HOST ? Kind::kPinned : Kind::kUnknown, -1};
}

// Addresses are unified, so any context of a started device will do.
Location locate_on_any_thread(const void* address) {
  if (const auto found = locate(address)) return *found;
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CUdevice device = 0;
    unsigned int flags = 0;
    int active = 0;
    check(driver().device_get(&device, ordinal), "cuDeviceGet");
    check(driver().primary_state(device, &flags, &active), "cuDevicePrimaryCtxGetState");
    if (!active) continue;
    const Current current(CudaDevice::get(ordinal).context());
    return locate(address).value_or(Location{Kind::kUnknown, -1});
  }
  return {Kind::kUnknown, -1};
}

// Returns the ordinal of the device whose memory this is.
int device_at(const void* address, const BufferName& what) {
  constexpr char kRemedy[] =
      ": pass device=CPU, or move the values to the GPU before the call (a tensor's .cuda())";
  require(address != nullptr, CGX_INVALID_ARGUMENT, what, " is a null pointer");
  const Location at = locate_on_any_thread(address);
  require(at.kind != Kind::kPinned, CGX_INVALID_ARGUMENT, what, " is in pinned host memory",
          kRemedy);
  require(at.kind == Kind::kDevice, CGX_INVALID_ARGUMENT, what, " (address ", address,
          ") is in host memory, or in GPU memory that has been freed", kRemedy);
  return at.ordinal;
}

}  // namespace

CudaDevice& CudaDevice::get(int ordinal) {
  static std::mutex mutex;
  static auto& devices = *new std::map<int, std::unique_ptr<CudaDevice>>;  // never destroyed
  const std::lock_guard lock(mutex);
  auto& device = devices[ordinal];
  if (!device) device.reset(new CudaDevice(ordinal));
  return *device;
}

CudaDevice::CudaDevice(int ordinal) : ordinal_(ordinal), name_(join("cuda:", ordinal)) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, ordinal), "querying the properties of ", name());
  require(properties.major >= kOldestMajor, CGX_UNSUPPORTED, name(), " (", properties.name,
          ") has compute capability ", properties.major, ".", properties.minor,
          ", but cgx_ops needs ", kOldestMajor, ".0 or newer: pass device=CPU");
  processors_ = properties.multiProcessorCount;
  flushes_remote_writes_ =
      properties.gpuDirectRDMAFlushWritesOptions & cudaFlushGPUDirectRDMAWritesOptionHost;
  CUdevice device = 0;
  check(driver().device_get(&device, ordinal), "cuDeviceGet of ", name());
  check(driver().device_uuid(&uuid_, device), "cuDeviceGetUuid of ", name());
  check(driver().retain_primary(&context_, device), "starting ", name());
  const Current current(context_);
  load_kernels();
}

std::unique_ptr<Queue> CudaDevice::make_queue() { return std::make_unique<CudaQueue>(*this); }

std::unique_ptr<Event> CudaDevice::make_event() { return std::make_unique<CudaEvent>(*this); }

std::unique_ptr<Queue> CudaDevice::wrap(void* stream) {
  return std::make_unique<CudaQueue>(*this, static_cast<cudaStream_t>(stream));
}

bool CudaDevice::recording(void* stream) {
  const Current current(context_);
  cudaStreamCaptureStatus status{};
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status),
        "cudaStreamIsCapturing on ", name());
  return status != cudaStreamCaptureStatusNone;
}

void CudaDevice::synchronize() {
  const Current current(context_);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize on ", name());
}

Memory CudaDevice::allocate(size_t bytes, Place place) {
  const Current current(context_);
  return place == Place::kDevice ? allocate_device(bytes) : allocate_pinned(bytes);
}

Memory CudaDevice::allocate_device(size_t bytes) {
  void* address = nullptr;
  if (const cudaError_t error = cudaMalloc(&address, std::max<size_t>(bytes, 1))) {
    size_t available = 0, total = 0;
    cudaMemGetInfo(&available, &total);
    fail_cuda(error, join("cudaMalloc of ", size_text(bytes), " on ", name(), " (",
                          size_text(available), " of ", size_text(total), " free)"));
  }
  Memory memory(static_cast<std::byte*>(address),
                [this](std::byte* at) { release([at] { cudaFree(at); }); });
  // On a separate stream: the default stream may be capturing or busy.
  CudaQueue queue(*this);
  queue.clear(address, bytes);
  queue.synchronize();
  return memory;
}

Memory CudaDevice::allocate_pinned(size_t bytes) {
  void* address = nullptr;  // the same for the device: addresses are unified
  check(cudaHostAlloc(&address, std::max<size_t>(bytes, 1),
                      cudaHostAllocPortable | cudaHostAllocMapped),
        "cudaHostAlloc of ", size_text(bytes), " for ", name());
  std::memset(address, 0, bytes);
  return Memory(static_cast<std::byte*>(address),
                [this](std::byte* at) { release([at] { cudaFreeHost(at); }); });
}

Bytes CudaDevice::share(const Memory& memory) { return cuda::share(*this, memory.get()); }

Memory CudaDevice::open(const Bytes& shared) { return cuda::open(*this, shared); }

std::unique_ptr<Fabric> CudaDevice::make_fabric() {
  return std::make_unique<NcclFabric>(Nccl::find(), *this);
}

bool CudaDevice::reached_by_mpi() {
  Mpi* const mpi = opened_mpi();
  return mpi && mpi->cuda_aware();
}

std::shared_ptr<void> CudaDevice::make_current() { return std::make_shared<Current>(context_); }

void CudaDevice::flush_remote_writes() {
  if (!flushes_remote_writes_) return;  // not needed, or not supported
  check(cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTargetCurrentDevice,
                                           cudaFlushGPUDirectRDMAWritesToOwner),
        "cudaDeviceFlushGPUDirectRDMAWrites on ", name());
}

void CudaDevice::check_address(const void* address, const BufferName& what) {
  const int ordinal = device_at(address, what);
  require(ordinal == ordinal_, CGX_INVALID_ARGUMENT, what, " is on cuda:", ordinal,
          ", but other buffers of this call or communicator are on cuda:", ordinal_,
          ": all of them must be on one GPU");
}

}  // namespace cgx::device::cuda

namespace cgx::device {

Device& device_of(const void* address) {
  if (address) return cuda::CudaDevice::get(cuda::device_at(address, {"the first buffer"}));
  int current = 0;
  cuda::check(cudaGetDevice(&current), "querying the current GPU");
  return cuda::CudaDevice::get(current);
}

}  // namespace cgx::device
