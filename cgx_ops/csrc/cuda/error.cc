#include "cuda/error.h"

#include <iterator>

namespace cgx::device::cuda {
namespace {

struct Remedy {
  cudaError_t error;
  const char* text;
};

constexpr char kBroken[] =
    "An earlier kernel, of this library or another, has put the GPU context of this process in an "
    "error state: restart the process, and use compute-sanitizer to find the kernel";
constexpr char kRecording[] =
    "A stream is capturing a CUDA graph: captured work must run on that stream or one forked from "
    "it, and not on the default stream";

constexpr Remedy kRemedies[] = {
    {cudaErrorNoDevice,
     "There is no GPU, or CUDA_VISIBLE_DEVICES hides all of them: pass device=CPU"},
    {cudaErrorInitializationError,
     "If this process was forked from one that used CUDA, start workers with spawn; otherwise "
     "check nvidia-smi"},
    {cudaErrorSystemDriverMismatch,
     "The driver's library and kernel module have different versions: reboot, or reload the "
     "module"},
    {cudaErrorDevicesUnavailable,
     "Another process uses the GPU exclusively: nvidia-smi --compute-mode=DEFAULT lets ranks share "
     "it"},
    {cudaErrorMemoryAllocation,
     "Reduce the memory that other programs and the framework use on this GPU or host"},
    {cudaErrorInvalidResourceHandle,
     "The stream belongs to a different GPU than the buffers, or has been destroyed"},
    {cudaErrorInvalidConfiguration, "This is a defect in cgx: please report it"},
    {cudaErrorStreamCaptureUnsupported, kRecording},
    {cudaErrorStreamCaptureInvalidated, kRecording},
    {cudaErrorStreamCaptureIsolation, kRecording},
    {cudaErrorStreamCaptureImplicit, kRecording},
    {cudaErrorIllegalAddress, kBroken},
    {cudaErrorMisalignedAddress, kBroken},
    {cudaErrorLaunchFailure, kBroken},
    {cudaErrorLaunchTimeout, kBroken},
    {cudaErrorAssert, kBroken},
    {cudaErrorHardwareStackError, kBroken},
    {cudaErrorECCUncorrectable, "The GPU's memory is damaged: check nvidia-smi -q"},
};

std::string remedy(cudaError_t error) {
  if (error == cudaErrorInsufficientDriver) {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    const std::string built = version_text(CUDART_VERSION);
    return driver == 0 ? "This machine has no NVIDIA driver (libcuda.so.1): run on a machine with "
                         "a driver, or pass device=CPU"
                       : join("The driver supports CUDA ", version_text(driver),
                              ", but this cgx_ops was built with ", built,
                              ": update the driver, or rebuild with an older toolkit");
  }
  for (const Remedy& row : kRemedies)
    if (row.error == error) return row.text;
  return "";
}

}  // namespace

void fail_cuda(cudaError_t error, const std::string& what) {
  const std::string help = remedy(error);
  cudaGetLastError();
  fail(CGX_SYSTEM, what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")",
       help.empty() ? "" : ". ", help);
}

std::string size_text(size_t bytes) {
  constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return join(bytes, " ", kUnits[0]);
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  const auto tenths = static_cast<int64_t>(value * 10 + 0.5);
  return join(tenths / 10, ".", tenths % 10, " ", kUnits[unit]);
}

std::string version_text(int version) { return join(version / 1000, ".", version % 1000 / 10); }

}  // namespace cgx::device::cuda
