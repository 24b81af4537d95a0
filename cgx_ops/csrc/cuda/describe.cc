// The CUDA part of `info`. Queries the driver, but starts no device: no contexts, no kernels.
#include "cuda/error.h"
#include "device/queue.h"

namespace cgx::device {
namespace {

using cuda::version_text;

std::string describe_driver() {
  int version = 0;  // stays 0 without a driver
  return cudaDriverGetVersion(&version) == cudaSuccess && version != 0
             ? join("\"", version_text(version), "\"")
             : "null";
}

// Device names have no characters that JSON escapes.
std::string describe_device(int ordinal) {
  cudaDeviceProp properties{};
  cuda::check(cudaGetDeviceProperties(&properties, ordinal),
              "querying the properties of cuda:", ordinal);
  return join("{\"name\": \"", properties.name, "\", \"capability\": \"", properties.major, ".",
              properties.minor, "\", \"memory_gib\": ", (properties.totalGlobalMem >> 30), "}");
}

}  // namespace

std::string describe_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    count = 0;
  }
  std::string devices;
  for (int ordinal = 0; ordinal < count; ++ordinal)
    devices += join(ordinal ? ", " : "", describe_device(ordinal));
  return join("{\"built\": \"", version_text(CUDART_VERSION), "\", \"driver\": ", describe_driver(),
              ", \"devices\": [", devices, "]}");
}

}  // namespace cgx::device
