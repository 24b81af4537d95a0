// The position of an element's noise in the output of Philox (docs/reference/wire_format.md,
// section 4).
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace cgx {

inline constexpr int kNoiseBlock = 128;    // elements
inline constexpr int kNoiseCounters = 16;  // per block; each produces eight 16-bit values

struct NoisePosition {
  uint64_t counter;
  int half;
};
CGX_HD NoisePosition noise_position(uint64_t element) {
  return {element / kNoiseBlock * kNoiseCounters + element % kNoiseCounters,
          static_cast<int>(element % kNoiseBlock) / kNoiseCounters};
}

}  // namespace cgx
