// The general kernels, around buckets.h: one for each dtype, kind of group, set of formats, and
// type of launch.
#pragma once

#include <type_traits>

#include "kernel/cuda/buckets.h"
#include "kernel/cuda/entry_points.h"
#include "kernel/cuda/group.h"
#include "kernel/cuda/with.h"
#include "kernel/cuda/work.h"

namespace cgx::device::cuda {

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

// A block is a group, so that variables equal in all lanes use uniform registers.
template <typename Value, typename Format, typename Group, typename Launch>
__global__ void __launch_bounds__(Group::kLanes, least_blocks<Format, Group, Launch>())
    run_buckets(const __grid_constant__ Launch launch, const __grid_constant__ Work work) {
  __shared__ alignas(16) std::byte buffer[Layout<Group>::kBytes];
  __shared__ typename Group::Shared shared;
  Group group(&shared);
  const Place place = place_of(launch.regions, launch.fault);
  int32_t piece = 0;
  for (int64_t at = blockIdx.x; at < work.items; at += gridDim.x)
    run_bucket<Value, Format>(group, buffer, launch, place,
                              find_item(launch.pieces, work, at, &piece));
}

template <Formats kFormats>
using BucketsOf = std::conditional_t<kFormats == Formats::kAny, AnyFormat, BlocksFormat>;
template <Formats kFormats>
using FormatOf = std::conditional_t<
    kFormats == Formats::kPlain, UniformFormat,
    std::conditional_t<kFormats == Formats::kSparse, SparseFormat, BucketsOf<kFormats>>>;

template <Formats kFormats, typename Launch>
const void* general_kernel(Dtype dtype, Takers takers) {
  return with_value(dtype, [&]<typename Value>(Value) {
    using Format = FormatOf<kFormats>;
    using LongGroup = Block<lanes_of(Takers::kBlocks)>;
    static_assert(Warp::kLanes == lanes_of(Takers::kWarps));
    return takers == Takers::kWarps
               ? reinterpret_cast<const void*>(&run_buckets<Value, Format, Warp, Launch>)
               : reinterpret_cast<const void*>(&run_buckets<Value, Format, LongGroup, Launch>);
  });
}

}  // namespace cgx::device::cuda
