// Converts CUDA's error codes to Errors with CUDA's text, the location and the remedy.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>

#include "base/status.h"

namespace cgx::device::cuda {

// Throws Error(CGX_SYSTEM): "<what>: <CUDA's text> (<code>). <remedy>". Clears the runtime's last
// error, so that the next check of another library does not report it.
[[noreturn]] void fail_cuda(cudaError_t error, const std::string& what);

// `what`: the call and the device, "cudaMemcpyAsync of 64.0 MiB on cuda:0".
template <typename... Parts>
void check(cudaError_t error, const Parts&... what) {
  if (error != cudaSuccess) [[unlikely]]
    fail_cuda(error, join(what...));
}

// The driver's error numbers equal the runtime's.
template <typename... Parts>
void check(CUresult result, const Parts&... what) {
  check(static_cast<cudaError_t>(result), what...);
}

// "1.2 GiB".
std::string size_text(size_t bytes);
// Formats CUDA's version number: 13020 is "13.2".
std::string version_text(int version);

}  // namespace cgx::device::cuda
