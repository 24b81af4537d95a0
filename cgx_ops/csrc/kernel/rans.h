// Constants of the entropy coder (docs/reference/entropy_coding.md): rANS on bytes, with 12-bit
// frequencies and interleaved lanes.
#pragma once

#include <cstdint>

namespace cgx {

inline constexpr int kSymbols = 256;
inline constexpr int kFrequencyBits = 12;
inline constexpr int kFrequencySum = 1 << kFrequencyBits;  // of all symbols
inline constexpr int kMostRansLanes = 32;

// Returns the number of lanes for `numel` symbols: a power of two. Each lane takes 4 bytes, so
// short inputs have fewer.
[[gnu::always_inline]] constexpr int rans_lanes(int64_t numel) {
  int lanes = 1;
  while (lanes < kMostRansLanes && numel >= 4096 * int64_t{lanes}) lanes *= 2;
  return lanes;
}

// Returns the largest size of a stream.
[[gnu::always_inline]] constexpr int64_t most_rans_bytes(int64_t numel, int lanes) {
  return 4 * lanes + 2 * numel;
}

}  // namespace cgx
