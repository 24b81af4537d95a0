// The noise of stochastic rounding (docs/reference/wire_format.md, section 4): for one element, or
// for whole blocks into shared memory.
#pragma once

#include <cstdint>

#include "base/noise_position.h"
#include "base/philox.h"
#include "kernel/cuda/arithmetic.h"
#include "kernel/cuda/memory.h"

namespace cgx::device::cuda {

struct Noise {
  uint64_t seed;
  uint32_t rank, phase;
};

struct NoiseWords {
  uint32_t at[4];
};
CGX_LANE NoiseWords noise_words(const Noise& noise, uint64_t counter) {
  uint64_t words[4] = {counter, counter >> 32, noise.rank, noise.phase};
  uint64_t seed = noise.seed;
#if defined(__CUDACC__)
  // Hides from the compiler that the seed is constant: computed only once, the keys would occupy 20
  // registers.
  asm volatile("" : "+l"(seed));
#endif
  philox4x32_7(words, PhiloxKeys(seed));
  NoiseWords result;
  CGX_UNROLL
  for (int i = 0; i < 4; ++i) result.at[i] = static_cast<uint32_t>(words[i]);
  return result;
}

// (u + 0.5) / 65536, exact: puts u into the upper bits of the fraction of a float in [1, 2), and
// subtracts 1.
CGX_LANE float uniform_noise(uint32_t u) {
  return subtract(float_of(0x3f800040u | (u & 0xffffu) << 7), 1.0f);
}

// For one element.
CGX_LANE float noise_of_element(const Noise& noise, uint64_t element) {
  const auto [counter, half] = noise_position(element);
  const NoiseWords words = noise_words(noise, counter);
  // Registers cannot be indexed.
  const uint32_t even = half & 4 ? words.at[2] : words.at[0];
  const uint32_t odd = half & 4 ? words.at[3] : words.at[1];
  return uniform_noise((half & 2 ? odd : even) >> (16 * (half & 1)));
}

// A lane's part of generating the noise of whole blocks from `first_block` on in a buffer: 2 bytes
// per element, in order.
template <int kLanes>
CGX_LANE void make_noise(int lane, const Noise& noise, uint64_t first_block, int blocks,
                         std::byte* buffer) {
  CGX_ROLLED
  for (int i = lane; i < blocks * kNoiseCounters; i += kLanes) {
    const NoiseWords words =
        noise_words(noise, first_block * kNoiseCounters + static_cast<uint64_t>(i));
    std::byte* to = buffer + 2 * (i / kNoiseCounters * kNoiseBlock + i % kNoiseCounters);
    CGX_UNROLL
    for (int half = 0; half < 8; ++half)
      store(to + 2 * kNoiseCounters * half,
            static_cast<uint16_t>(words.at[half / 2] >> (16 * (half % 2))));
  }
}

// For eight elements: the output of make_noise() at element `at` of the buffer, two per word.
CGX_LANE Words4 drawn_of_unit(const std::byte* buffer, int at) {
  Words4 words;
  if (at % kUnit == 0) {
    words = load<Words4>(buffer + 2 * at);
  } else {
    CGX_UNROLL
    for (int i = 0; i < 4; ++i)
      words.at[i] = uint32_t{load<uint16_t>(buffer + 2 * (at + 2 * i))} |
                    uint32_t{load<uint16_t>(buffer + 2 * (at + 2 * i + 1))} << 16;
  }
  return words;
}
CGX_LANE uint32_t drawn_at(const Words4& words, int i) {
  return words.at[i / 2] >> (16 * (i % 2)) & 0xffffu;
}

CGX_LANE Unit noise_of_unit(const std::byte* buffer, int at) {
  const Words4 words = drawn_of_unit(buffer, at);
  Unit noise;
  CGX_UNROLL
  for (int i = 0; i < kUnit; ++i) noise.at[i] = uniform_noise(drawn_at(words, i));
  return noise;
}

}  // namespace cgx::device::cuda
