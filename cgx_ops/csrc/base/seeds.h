// Seeds of a call's segments and of a reduce_scatter's blocks, derived from one seed, so that
// values whose errors may be summed never share noise. docs/reference/wire_format.md, section 4,
// defines them; tests/reference has the same functions.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace cgx {

// Different steps, so that segment 1 of block 0 and segment 0 of block 1 differ.
inline constexpr uint64_t kSegmentStep = 0xd1342543de82ef95;
inline constexpr uint64_t kBlockStep = 0xaf251af3b0f025b5;

// Returns the n-th seed after `seed`, by SplitMix64's output function (Steele, Lea and Flood,
// OOPSLA'14). The 0-th is `seed`.
CGX_HD uint64_t derived_seed(uint64_t seed, uint64_t step, uint64_t n) {
  if (n == 0) return seed;
  uint64_t z = seed + n * step;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

CGX_HD uint64_t segment_seed(uint64_t seed, int64_t segment) {
  return derived_seed(seed, kSegmentStep, static_cast<uint64_t>(segment));
}
CGX_HD uint64_t block_seed(uint64_t seed, int64_t block) {
  return derived_seed(seed, kBlockStep, static_cast<uint64_t>(block));
}

}  // namespace cgx
