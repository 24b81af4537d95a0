// The kernels around buckets.h, and their launches: one kernel per dtype, kind of group, and set of
// formats (work.h). Each launch type and set of formats has a file that includes this one, so that
// they compile in parallel.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "base/status.h"
#include "kernel/cuda/buckets.h"
#include "kernel/cuda/group.h"
#include "kernel/cuda/kernels.h"
#include "kernel/cuda/work.h"

namespace cgx::device::cuda {

// Throws unless a CUDA call succeeded. Clears CUDA's last error.
inline void require_success(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  fail(CGX_SYSTEM, what, ": ", cudaGetErrorString(status));
}

// ---- 1. the kernel: a block is a group, so that variables equal in all lanes use uniform
// registers ----

// The minimum number of blocks per multiprocessor, which determines the registers of a thread. For
// uniform buckets these are 80 with one warp per block, 64 with several, and 128 for Reduce; for
// any format 255 and 128.
template <typename Format, typename Group, typename Launch>
constexpr int least_blocks() {
  constexpr bool kWarp = Group::kLanes == kWarpLanes;
  if (!std::is_same_v<Format, UniformFormat>) return kWarp ? 8 : 1;
  if (std::is_same_v<Launch, Reduce>) return kWarp ? 16 : 1;
  return kWarp ? 24 : 2;
}

template <typename Value, typename Format, typename Group, typename Launch>
__global__ void __launch_bounds__(Group::kLanes, least_blocks<Format, Group, Launch>())
    run_buckets(const __grid_constant__ Launch launch, const __grid_constant__ Work work) {
  __shared__ alignas(16) std::byte buffer[Layout<Group>::kBytes];
  __shared__ typename Group::Shared shared;
  Group group(&shared);
  const Place place = place_of(launch.regions, launch.fault);
  int32_t piece = 0;
  for (int64_t at = blockIdx.x; at < work.buckets; at += gridDim.x)
    run_bucket<Value, Format>(group, buffer, launch, place, find_bucket(work, at, &piece));
}
static_assert(sizeof(Reduce) + sizeof(Work) <= 4096, "kernel parameters");

// ---- 2. launches ----

// Calls visit(kernel, takers) for the kernels of a dtype.
template <typename Format, typename Launch, typename Visit>
void for_kernels(Dtype dtype, const Visit& visit) {
  const auto of_value = [&](auto value) {
    using Value = decltype(value);
    static_assert(Warp::kLanes == lanes_of(Takers::kWarps));
    visit(&run_buckets<Value, Format, Warp, Launch>, Takers::kWarps);
    visit(&run_buckets<Value, Format, Block<lanes_of(Takers::kBlocks)>, Launch>, Takers::kBlocks);
  };
  switch (dtype) {
    case Dtype::kFloat32:
      return of_value(Float32{});
    case Dtype::kFloat16:
      return of_value(Float16{});
    case Dtype::kBfloat16:
      return of_value(Bfloat16{});
  }
}

// Launches the pieces that the kernels of this format support.
template <typename Format, typename Launch>
void launch_of(const Launch& launch, int processors, void* stream) {
  for_kernels<Format, Launch>(launch.dtype, [&](const auto& kernel, Takers takers) {
    Work work = work_for(Format::kFormats, takers, launch.pieces);
    if (work.buckets == 0) return;
    const auto blocks = static_cast<unsigned>(groups_for(takers, work.buckets, processors));
    const auto threads = static_cast<unsigned>(lanes_of(takers));
    void* arguments[] = {const_cast<Launch*>(&launch), &work};
    require_success(
        cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(threads),
                         arguments, 0, static_cast<cudaStream_t>(stream)),
        "launching a kernel");
  });
}

// Defined in the files of the other formats.
void launch_any(const Encode& encode, int processors, void* stream);
void launch_any(const Reduce& reduce, int processors, void* stream);
void launch_any(const Decode& decode, int processors, void* stream);
void launch_sparse(const Encode& encode, int processors, void* stream);
void launch_sparse(const Reduce& reduce, int processors, void* stream);
void launch_sparse(const Decode& decode, int processors, void* stream);

template <typename Launch>
void launch_all(Launch launch, bool reduces, int processors, void* stream) {
  cut_exact_pieces(&launch.pieces, reduces);
  launch_of<UniformFormat>(launch, processors, stream);
  launch_any(launch, processors, stream);
  launch_sparse(launch, processors, stream);
}

// ---- 3. loading ----

// Load the kernels of one file.
void load_encode_kernels();
void load_reduce_kernels();
void load_decode_kernels();
void load_any_encode_kernels();
void load_any_reduce_kernels();
void load_any_decode_kernels();
void load_sparse_encode_kernels();
void load_sparse_reduce_kernels();
void load_sparse_decode_kernels();
void load_signals_kernel();

inline void load_kernel(const void* kernel) {
  cudaFuncAttributes attributes;
  require_success(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
}

template <typename Format, typename Launch>
void load_kernels_of() {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBfloat16})
    for_kernels<Format, Launch>(dtype, [](const auto& kernel, Takers) {
      load_kernel(reinterpret_cast<const void*>(kernel));
    });
}

}  // namespace cgx::device::cuda
