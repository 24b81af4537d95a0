// The kernels of this folder. Their bodies are templates over the group, so that tests run them on
// the host.
#pragma once

#include "kernel/cuda/aligned/decode.h"
#include "kernel/cuda/aligned/encode.h"
#include "kernel/cuda/aligned/exact.h"
#include "kernel/cuda/aligned/formats.h"
#include "kernel/cuda/aligned/reduce.h"
#include "kernel/cuda/entry_points.h"
#include "kernel/cuda/group.h"
#include "kernel/cuda/with.h"

namespace cgx::device::cuda::aligned {

// The minimum number of blocks per multiprocessor, so that no registers are spilled.
inline constexpr int kMostBlocks = 16;  // 64 registers
template <typename Format>
constexpr int blocks_of_encode(bool residual) {  // 96, 80, 64 registers
  return residual ? 10 : Format::kFormat == BucketFormat::kLevels ? 12 : kMostBlocks;
}
constexpr int blocks_of_reduce(bool residual) { return residual ? 8 : 14; }  // 128, 72

template <typename Value, typename Format, int kLanes, bool kNoisy, bool kResidual>
__global__ void __launch_bounds__(kPairLanes, blocks_of_encode<Format>(kResidual))
    encode_aligned(const __grid_constant__ Encode launch, const __grid_constant__ Work work) {
  __shared__ alignas(16) std::byte memory[Format::template kMemoryBytes<kNoisy>];
  __shared__ Pair::Shared shared;
  Pair group(&shared);
  encode<Value, Format, kLanes, kNoisy, kResidual>(group, memory, launch, work, blockIdx.x,
                                                   gridDim.x);
}

template <typename Value, typename Format, int kLanes, bool kNoisy, bool kOwn, bool kResidual,
          bool kEncodes>
__global__ void __launch_bounds__(kPairLanes, blocks_of_reduce(kResidual))
    reduce_aligned(const __grid_constant__ Reduce launch, const __grid_constant__ Work work) {
  __shared__ ReduceMemory<Format, kNoisy, kEncodes> memory;
  __shared__ Pair::Shared shared;
  Pair group(&shared);
  reduce<Value, Format, kLanes, kNoisy, kOwn, kResidual, kEncodes>(group, &memory, launch, work,
                                                                   blockIdx.x, gridDim.x);
}

template <typename Value, typename Format, int kLanes>
__global__ void __launch_bounds__(kPairLanes, kMostBlocks)
    decode_aligned(const __grid_constant__ Decode launch, const __grid_constant__ Work work) {
  __shared__ alignas(16) std::byte scratch[kPairLanes * kScratchBytes];
  Pair group(nullptr);
  decode<Value, Format, kLanes>(group, scratch, launch, work, blockIdx.x, gridDim.x);
}

template <typename Value, typename Launch>
__global__ void __launch_bounds__(kPairLanes, kMostBlocks)
    run_exact(const __grid_constant__ Launch launch, const __grid_constant__ Work work) {
  Pair group(nullptr);
  exact<Value>(group, launch, work, blockIdx.x, gridDim.x);
}

// Returns the kernel of Reduce for sums that are encoded.
const void* records_kernel(Dtype dtype, const Variant& variant, bool noisy);

template <typename Launch>
const void* exact_kernel(Dtype dtype) {
  return with_value(dtype, []<typename Value>(Value) {
    return reinterpret_cast<const void*>(&run_exact<Value, Launch>);
  });
}

}  // namespace cgx::device::cuda::aligned
