#include "cuda/driver.h"

namespace cgx::device::cuda {
namespace {

// `version`: the CUDA version that introduced this signature.
template <typename Function>
void find(const char* name, unsigned int version, Function* function) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableLegacyStream, &found),
        "looking up the driver's ", name);
  require(found == cudaDriverEntryPointSuccess && address != nullptr, CGX_SYSTEM,
          "the NVIDIA driver does not have ", name, " of CUDA ",
          version_text(static_cast<int>(version)), ": update the driver");
  *function = reinterpret_cast<Function>(address);
}

Driver load() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "looking for GPUs");  // has the best error texts
  Driver driver{};
  find("cuDeviceGet", 2000, &driver.device_get);
  find("cuDeviceGetUuid", 11040, &driver.device_uuid);
  find("cuDevicePrimaryCtxRetain", 7000, &driver.retain_primary);
  find("cuDevicePrimaryCtxGetState", 7000, &driver.primary_state);
  find("cuCtxPushCurrent", 4000, &driver.push);
  find("cuCtxPopCurrent", 4000, &driver.pop);
  find("cuPointerGetAttributes", 7000, &driver.pointer_attributes);
  // Version 2, which needs no option of the kernel module.
  find("cuStreamWaitValue32", 11070, &driver.wait_value);
  return driver;
}

thread_local CUcontext current_context = nullptr;  // of the innermost Current

}  // namespace

const Driver& driver() {
  static const Driver loaded = load();
  return loaded;
}

Current::Current(CUcontext context) : outer_(current_context) {
  if (context == outer_) return;
  check(driver().push(context), "making a GPU's context current");
  // After the push: on a thread without a context the runtime would start one on device 0.
  if (const cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode_)) {
    CUcontext ours = nullptr;
    driver().pop(&ours);
    fail_cuda(error, "cudaThreadExchangeStreamCaptureMode");
  }
  current_context = context;
}

Current::~Current() {
  if (current_context == outer_) return;
  current_context = outer_;
  cudaThreadExchangeStreamCaptureMode(&mode_);
  CUcontext ours = nullptr;
  driver().pop(&ours);
}

}  // namespace cgx::device::cuda
