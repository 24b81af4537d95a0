// Where the noise of an element is among what Philox makes (docs/reference/wire_format.md, section 4).
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace cgx {

inline constexpr int kNoiseBlock = 128;    // elements
inline constexpr int kNoiseCounters = 16;  // of a block: each makes eight halves of a word

struct NoisePlace {
  uint64_t counter;
  int half;
};
CGX_HD NoisePlace noise_place(uint64_t element) {
  return {element / kNoiseBlock * kNoiseCounters + element % kNoiseCounters,
          static_cast<int>(element % kNoiseBlock) / kNoiseCounters};
}

}  // namespace cgx
