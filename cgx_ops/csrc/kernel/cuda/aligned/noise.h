// The noise of stochastic rounding for a tile, in shared memory.
#pragma once

#include <cstdint>

#include "kernel/cuda/aligned/tile.h"
#include "kernel/cuda/memory.h"
#include "kernel/cuda/noise.h"

namespace cgx::device::cuda::aligned {

// Word j of counter i at (j * kNoiseRow + i). Neighboring values
// have neighboring counters, and the same half of the same word.
inline constexpr int kTileCounters = kTileNumel / kNoiseBlock * kNoiseCounters;
inline constexpr int kNoiseRow = kTileCounters + 4;  // words; rows begin in different banks
inline constexpr int kNoiseBytes = 4 * kNoiseRow * 4;

// A lane's part: two counters of its bucket.
template <int kLanes>
CGX_LANE void make_noise(const Tiling<kLanes>& tiling, int lane, const Noise& noise,
                         uint64_t first_value, std::byte* buffer) {
  const uint64_t first = first_value / kNoiseBlock * kNoiseCounters;
  constexpr int kEach = kTileCounters / kPairLanes;
  CGX_UNROLL
  for (int i = 0; i < kEach; ++i) {
    const int number = (tiling.bucket(lane) * kEach + i) * tiling.lanes() + tiling.in_bucket(lane);
    const NoiseWords words = noise_words(noise, first + static_cast<uint64_t>(number));
    CGX_UNROLL
    for (int j = 0; j < 4; ++j) store(buffer + 4 * (j * kNoiseRow + number), words.at[j]);
  }
}

// For kChunk values from value `at` of the tile on.
template <int kChunk>
CGX_LANE void load_noise(const std::byte* buffer, int at, float* noise) {
  const int half = at % kNoiseBlock / kNoiseCounters;
  const int number = at / kNoiseBlock * kNoiseCounters + at % kNoiseCounters;
  const std::byte* from = buffer + 4 * (half / 2 * kNoiseRow + number);
  const int shift = 16 * (half % 2);
  CGX_UNROLL
  for (int i = 0; i < kChunk; i += 4) {
    const auto words = load<Words4>(from + 4 * i);
    CGX_UNROLL
    for (int j = 0; j < 4; ++j) noise[i + j] = uniform_noise(words.at[j] >> shift);
  }
}

}  // namespace cgx::device::cuda::aligned
