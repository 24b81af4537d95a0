// CUDA's error codes as Errors, with CUDA's words, where it happened and the remedy.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>

#include "base/status.h"

namespace cgx::device::cuda {

// Throws Error(CGX_SYSTEM): "<what>: <CUDA's words> (<code>). <remedy>". What the runtime keeps as
// its last error is cleared: somebody else's next check must not find ours.
[[noreturn]] void fail_cuda(cudaError_t error, const std::string& what);

// what: the call and where, "cudaMemcpyAsync of 64.0 MiB on cuda:0".
template <typename... Parts>
void check(cudaError_t error, const Parts&... what) {
  if (error != cudaSuccess) [[unlikely]]
    fail_cuda(error, join(what...));
}

// The driver numbers its errors as the runtime does.
template <typename... Parts>
void check(CUresult result, const Parts&... what) {
  check(static_cast<cudaError_t>(result), what...);
}

// "1.2 GiB".
std::string size_text(size_t bytes);
// A version as CUDA counts it, 13020: "13.2".
std::string version_text(int version);

}  // namespace cgx::device::cuda
