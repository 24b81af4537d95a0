// A group of lanes that process one bucket: a thread block of one or more warps. Kernel code is a
// sequence of steps, `group.each(step)`: every lane runs the step, then they synchronize. (Pair,
// whose lanes process several buckets, synchronizes on request.) Variables that live across steps
// are Lanes<T>; all others are equal in every lane.
//
// So a host can run the same code with a loop over lanes, in any order (tests/cpp/host_group.h).
// Data that a step writes for other lanes may be read only in later steps.
#pragma once

#include <cstdint>

#include "base/host_device.h"

// Compiled for the GPU in .cu files, and for the host in tests.
#if defined(__CUDACC__)
#define CGX_LANE __device__ __forceinline__
#else
#define CGX_LANE inline
#endif

namespace cgx::device::cuda {

struct Extremes {
  int32_t lowest, highest;
};

#if defined(__CUDACC__)

// The current lane's value; `lane` is always the current lane.
template <typename T>
struct OwnLane {
  T own;
  CGX_LANE T& operator[](int /*lane*/) { return own; }
};

CGX_LANE Extremes extremes_of_warp(Extremes mine) {
  return {__reduce_min_sync(~0u, mine.lowest), __reduce_max_sync(~0u, mine.highest)};
}

struct Warp {
  static constexpr int kLanes = 32;
  struct Shared {};
  template <typename T>
  using Lanes = OwnLane<T>;

  CGX_LANE explicit Warp(Shared* /*shared*/) : lane(static_cast<int>(threadIdx.x)) {}

  template <typename Step>
  CGX_LANE void each(const Step& step) {
    step(lane);
    __syncwarp();
  }
  CGX_LANE Extremes extremes(OwnLane<Extremes>& mine) { return extremes_of_warp(mine.own); }
  CGX_LANE bool any(OwnLane<bool>& mine) { return __any_sync(~0u, mine.own); }
  CGX_LANE int32_t sum(OwnLane<int32_t>& mine) { return __reduce_add_sync(~0u, mine.own); }

  int lane;
};

// Two warps, for buckets of 8, 16, 32 or 64 lanes each (aligned/tile.h). Only lanes of one bucket
// exchange data, so steps do not synchronize.
struct Pair {
  static constexpr int kLanes = 64;
  struct Shared {
    Extremes of_warp[2];
  };
  template <typename T>
  using Lanes = OwnLane<T>;

  CGX_LANE explicit Pair(Shared* shared) : lane(static_cast<int>(threadIdx.x)), shared_(shared) {}

  // Selects the first lanes, whole buckets, for all further steps. Returns false in the other
  // lanes, which must then skip these steps.
  CGX_LANE bool select(uint32_t active) const { return static_cast<uint32_t>(lane) < active; }
  template <typename Step>
  CGX_LANE void for_lanes(const Step& step) const {
    step(lane);
  }
  // Synchronizes the lanes of each bucket.
  CGX_LANE void synchronize(int lanes_of_bucket) const {
    if (lanes_of_bucket > 32)
      __syncthreads();
    else
      __syncwarp(mask_of(lanes_of_bucket));
  }
  // The value of lane `number` % kCount of those kCount lanes, a power of two, to which this one
  // belongs. Warps must be active as a whole.
  template <int kCount, typename T>
  CGX_LANE T other(const OwnLane<T>& values, int /*lane*/, uint32_t number) const {
    return __shfl_sync(~0u, values.own, static_cast<int>(number), kCount);
  }
  // Gives each lane the extremes of its bucket.
  CGX_LANE void share_extremes(OwnLane<Extremes>& keys, int lanes_of_bucket) const {
    Extremes& own = keys.own;
    if (lanes_of_bucket < 32) {
      const unsigned mask = mask_of(lanes_of_bucket);
      CGX_ROLLED
      for (int other = lanes_of_bucket / 2; other > 0; other /= 2)
        own = wider(own, {__shfl_xor_sync(mask, own.lowest, other),
                          __shfl_xor_sync(mask, own.highest, other)});
      return;
    }
    own = extremes_of_warp(own);
    if (lanes_of_bucket == 32) return;
    shared_->of_warp[lane / 32] = own;
    __syncthreads();
    own = wider(own, shared_->of_warp[1 - lane / 32]);
    __syncthreads();
  }

  int lane;

 private:
  CGX_LANE unsigned mask_of(int lanes_of_bucket) const {
    if (lanes_of_bucket >= 32) return ~0u;
    return ((1u << lanes_of_bucket) - 1) << (lane % 32 & -lanes_of_bucket);
  }
  CGX_LANE static Extremes wider(const Extremes& a, const Extremes& b) {
    return {min(a.lowest, b.lowest), max(a.highest, b.highest)};
  }

  Shared* shared_;
};

template <int kThreads>
struct Block {
  static constexpr int kLanes = kThreads;
  static constexpr int kWarps = kThreads / 32;
  static_assert(kWarps <= 32);
  struct Shared {
    Extremes of_warp[kWarps];
  };
  template <typename T>
  using Lanes = OwnLane<T>;

  CGX_LANE explicit Block(Shared* shared) : lane(static_cast<int>(threadIdx.x)), shared_(shared) {}

  template <typename Step>
  CGX_LANE void each(const Step& step) {
    step(lane);
    __syncthreads();
  }
  CGX_LANE Extremes extremes(OwnLane<Extremes>& mine) {
    shared_->of_warp[lane / 32] = extremes_of_warp(mine.own);
    __syncthreads();
    const Extremes all = extremes_of_warp(shared_->of_warp[lane % kWarps]);
    __syncthreads();
    return all;
  }
  CGX_LANE int32_t sum(OwnLane<int32_t>& mine) {
    shared_->of_warp[lane / 32].lowest = __reduce_add_sync(~0u, mine.own);
    __syncthreads();
    const int32_t own = lane % 32 < kWarps ? shared_->of_warp[lane % 32].lowest : 0;
    const int32_t all = __reduce_add_sync(~0u, own);
    __syncthreads();
    return all;
  }

  int lane;

 private:
  Shared* shared_;
};

#endif

}  // namespace cgx::device::cuda
