// Runs the code of GPU kernels (kernel/cuda/group.h) on the host: a loop over the lanes, forwards
// or backwards. If a lane reads what another lane writes in the same step, the two orders give
// different results.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>

#include "kernel/cuda/group.h"

namespace cgx::device::cuda {

template <int kCount>
class HostGroup {
 public:
  static constexpr int kLanes = kCount;
  template <typename T>
  using Lanes = std::array<T, kCount>;

  explicit HostGroup(bool backwards = false) : backwards_(backwards) {}

  template <typename Step>
  void each(const Step& step) {
    for (int i = 0; i < kLanes; ++i) step(backwards_ ? kLanes - 1 - i : i);
  }
  Extremes extremes(const Lanes<Extremes>& all) const {
    Extremes result = all[0];
    for (const Extremes& one : all) {
      result.lowest = std::min(result.lowest, one.lowest);
      result.highest = std::max(result.highest, one.highest);
    }
    return result;
  }
  int32_t sum(const Lanes<int32_t>& all) const { return std::reduce(all.begin(), all.end()); }
  bool any(const Lanes<bool>& all) const { return std::ranges::find(all, true) != all.end(); }

 private:
  const bool backwards_;
};

// The lanes of a tile (kernel/cuda/group.h, Pair).
class HostPair {
 public:
  static constexpr int kLanes = 64;
  template <typename T>
  using Lanes = std::array<T, kLanes>;

  explicit HostPair(bool backwards = false) : backwards_(backwards) {}

  bool select(uint32_t active) {
    active_ = static_cast<int>(std::min<uint32_t>(active, kLanes));
    return active_ > 0;
  }
  template <typename Step>
  void for_lanes(const Step& step) {
    for (int i = 0; i < active_; ++i) step(backwards_ ? active_ - 1 - i : i);
  }
  void synchronize(int /*lanes_of_bucket*/) {}
  template <int kCount, typename T>
  T other(const Lanes<T>& values, int lane, uint32_t number) const {
    return values[lane / kCount * kCount + number % kCount];
  }
  void share_extremes(Lanes<Extremes>& keys, int lanes_of_bucket) {
    for (int first = 0; first < active_; first += lanes_of_bucket) {
      Extremes all = keys[first];
      for (int i = first; i < first + lanes_of_bucket; ++i)
        all = {std::min(all.lowest, keys[i].lowest), std::max(all.highest, keys[i].highest)};
      std::fill_n(keys.begin() + first, lanes_of_bucket, all);
    }
  }

 private:
  const bool backwards_;
  int active_ = kLanes;
};

}  // namespace cgx::device::cuda
