// Groups of lanes on the host, for the code of the GPU's kernels (kernel/cuda/group.h): a loop for
// the lanes, from the first or from the last. Results that depend on the order have a step that
// reads what another lane writes in the same step.
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

}  // namespace cgx::device::cuda
