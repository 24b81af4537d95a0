// The noise of stochastic and shift rounding, in blocks of 128 elements (docs/wire_format.md,
// section 4): sixteen Philox counters in the lanes of vector registers give eight elements each.
// The block made last is kept, since short buckets need one block many times.
#pragma once

#include <cstdint>

#include "base/philox.h"
#include "base/types.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace cgx::cpu::CGX_TARGET {
namespace {

// A register of 64-bit lanes, and the product of their low halves.
#if defined(__AVX512F__)
typedef uint64_t Lanes __attribute__((vector_size(64)));
[[gnu::always_inline]] inline Lanes multiply_low_halves(Lanes a, uint32_t b) {
  // Unmasked, GCC 12 warns of an undefined register inside its own header.
  return Lanes(_mm512_maskz_mul_epu32(0xff, __m512i(a), _mm512_set1_epi64(b)));
}
#elif defined(__AVX2__)
typedef uint64_t Lanes __attribute__((vector_size(32)));
[[gnu::always_inline]] inline Lanes multiply_low_halves(Lanes a, uint32_t b) {
  return Lanes(_mm256_mul_epu32(__m256i(a), _mm256_set1_epi64x(b)));
}
#elif defined(__SSE2__)
typedef uint64_t Lanes __attribute__((vector_size(16)));
[[gnu::always_inline]] inline Lanes multiply_low_halves(Lanes a, uint32_t b) {
  return Lanes(_mm_mul_epu32(__m128i(a), _mm_set1_epi64x(b)));
}
#elif defined(__ARM_NEON)
typedef uint64_t Lanes __attribute__((vector_size(16)));
[[gnu::always_inline]] inline Lanes multiply_low_halves(Lanes a, uint32_t b) {
  return Lanes(vmull_u32(vmovn_u64(uint64x2_t(a)), vdup_n_u32(b)));
}
#endif

class Noise {
 public:
  static constexpr uint64_t kBlock = 128;

  explicit Noise(const Rounding& rounding) : rounding_(rounding) {}

  // r of element `index` and of those after it in the same block.
  const float* at(uint64_t index) {
    if (index / kBlock != block_) {
      block_ = index / kBlock;
      fill();
    }
    return r_ + index % kBlock;
  }

  // How many of them there are.
  static int64_t left(uint64_t index) { return static_cast<int64_t>(kBlock - index % kBlock); }

 private:
  static constexpr int kCounters = 16;
  static constexpr int kLanes = sizeof(Lanes) / sizeof(uint64_t);
  static constexpr uint64_t kLaneIndex[kCounters] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                     8, 9, 10, 11, 12, 13, 14, 15};

  void fill() {
    alignas(64) uint64_t words[4][kCounters];
    const uint64_t counter = block_ * kCounters;
    for (int first = 0; first < kCounters; first += kLanes) {
      Lanes state[4];
      __builtin_memcpy(&state[0], kLaneIndex + first, sizeof(Lanes));
      state[0] += counter;
      state[1] = Lanes{} + (counter >> 32);
      state[2] = Lanes{} + uint64_t{rounding_.rank};
      state[3] = Lanes{} + uint64_t{rounding_.phase};
      philox4x32_10(state, rounding_.seed, multiply_low_halves);
      for (int word = 0; word < 4; ++word) {
        __builtin_memcpy(&words[word][first], &state[word], sizeof(Lanes));
      }
    }
    for (int word = 0; word < 4; ++word) {
      float* r = r_ + 2 * kCounters * word;
      for (int i = 0; i < kCounters; ++i) {
        r[i] = uniform(static_cast<uint32_t>(words[word][i]) & 0xffff);
      }
      for (int i = 0; i < kCounters; ++i) {
        r[kCounters + i] = uniform(static_cast<uint32_t>(words[word][i]) >> 16);
      }
    }
  }

  // (u + 0.5) / 65536, exact.
  [[gnu::always_inline]] static float uniform(uint32_t u) {
    return static_cast<float>(static_cast<int32_t>(u)) * 0x1p-16f + 0x1p-17f;
  }

  const Rounding rounding_;
  uint64_t block_ = ~uint64_t{0};  // none
  alignas(64) float r_[kBlock] = {};
};

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
