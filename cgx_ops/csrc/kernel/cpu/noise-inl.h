// The noise of stochastic and shift rounding, in blocks of 128 elements
// (docs/reference/wire_format.md, section 4). Sixteen Philox counters in the lanes of vector
// registers give eight elements each. A few blocks are generated at a time and cached, since short
// buckets need the same block many times. Shift rounding needs only one element per bucket.
#pragma once

#include <cstdint>

#include "base/noise_position.h"
#include "base/philox.h"
#include "base/types.h"
#include "kernel/cpu/vectors-inl.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace cgx::cpu::CGX_TARGET {
namespace {

// Multiplies the low halves of 64-bit lanes.
[[gnu::always_inline]] inline Words multiply_low_halves(Words a, uint32_t b) {
#if defined(__AVX512F__)
  // The unmasked version causes a warning in a header of GCC 12 about an undefined register.
  return Words(_mm512_maskz_mul_epu32(0xff, __m512i(a), _mm512_set1_epi64(b)));
#elif defined(__AVX2__)
  return Words(_mm256_mul_epu32(__m256i(a), _mm256_set1_epi64x(b)));
#elif defined(__SSE2__)
  return Words(_mm_mul_epu32(__m128i(a), _mm_set1_epi64x(b)));
#elif defined(__ARM_NEON)
  return Words(vmull_u32(vmovn_u64(uint64x2_t(a)), vdup_n_u32(b)));
#endif
}

// Two registers processed together: a round of Philox is a chain of a few slow steps, and two
// chains take hardly longer than one.
struct Twin {
  Words a, b;
  Twin operator>>(int shift) const { return {a >> shift, b >> shift}; }
  Twin operator^(const Twin& other) const { return {a ^ other.a, b ^ other.b}; }
  Twin operator^(uint64_t word) const { return {a ^ word, b ^ word}; }
};
constexpr int kTwinLanes = sizeof(Twin) / sizeof(uint64_t);

// first, first + 1, ...
[[gnu::always_inline]] inline Twin counting_from(uint64_t first) {
  static constexpr uint64_t kCount[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Twin lanes;
  __builtin_memcpy(&lanes.a, kCount, sizeof(lanes.a));
  __builtin_memcpy(&lanes.b, kCount + kTwinLanes / 2, sizeof(lanes.b));
  return {lanes.a + first, lanes.b + first};
}

// The low half of every lane.
[[gnu::always_inline]] inline Ints low_words(const Twin& twin) {
  const auto a = Ints(twin.a), b = Ints(twin.b);
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#elif defined(__AVX2__)
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
#else
  return __builtin_shufflevector(a, b, 0, 2, 4, 6);
#endif
}

class Noise {
 public:
  explicit Noise(const Rounding& rounding) : rounding_(rounding), keys_(rounding.seed) {}

  // The noise r of elements [index, index + 16).
  [[gnu::always_inline]] Floats16 at(uint64_t index) {
    if (index % kSixteen == 0) return group(index / kSixteen);
    // For buckets whose size is not a multiple of 16.
    alignas(64) float two[2 * kSixteen];
    store_registers(group(index / kSixteen), two);
    store_registers(group(index / kSixteen + 1), two + kSixteen);
    return load_registers<Floats16>(two + index % kSixteen);
  }

  // The noise r of one element.
  float of(uint64_t index) const {
    const auto [counter, half] = noise_position(index);
    uint64_t words[4] = {counter, counter >> 32, rounding_.rank, rounding_.phase};
    philox4x32_7(words, keys_);
    const auto u = static_cast<uint16_t>(words[half / 2] >> 16 * (half % 2));
    return (static_cast<float>(u) + 0.5f) / 65536;
  }

 private:
  // A block has eight groups of sixteen: for each of the four words the low halves, then the high
  // halves.
  static constexpr int kGroups = 8;
  static constexpr int kBlocks = 4;  // generated at a time

  [[gnu::always_inline]] Floats16 group(uint64_t number) {
    if (number / (kGroups * kBlocks) != made_) [[unlikely]]
      fill(number / (kGroups * kBlocks));
    const auto words = load_registers<Ints16>(words_[number % (kGroups * kBlocks) / 2]);
    // (u + 0.5) / 65536, exact: puts u into the upper bits of the fraction of a float in [1, 2),
    // and subtracts 1.
    const auto uniform = [](Ints u) { return Floats((u & 0x007fff80) | 0x3f800040) - 1.0f; };
    return number % 2 ? map<Floats16>(words, [&](Ints word) { return uniform(word >> 9); })
                      : map<Floats16>(words, [&](Ints word) { return uniform(word << 7); });
  }

  [[gnu::noinline]] void fill(uint64_t number) {
    made_ = number;
    constexpr Twin kZero{};
    for (uint64_t block = 0; block < kBlocks; ++block) {
      const uint64_t counter = (number * kBlocks + block) * kNoiseCounters;
      for (int first = 0; first < kNoiseCounters; first += kTwinLanes) {
        Twin state[4] = {counting_from(counter + static_cast<uint64_t>(first)),
                         kZero ^ (counter >> 32), kZero ^ uint64_t{rounding_.rank},
                         kZero ^ uint64_t{rounding_.phase}};
        philox4x32_7(state, keys_, [](const Twin& x, uint32_t by) {
          return Twin{multiply_low_halves(x.a, by), multiply_low_halves(x.b, by)};
        });
        for (int word = 0; word < 4; ++word) {
          const Ints low = low_words(state[word]);
          __builtin_memcpy(&words_[4 * block + word][first], &low, sizeof(low));
        }
      }
    }
  }

  const Rounding rounding_;
  const PhiloxKeys keys_;
  uint64_t made_ = ~uint64_t{0};  // none
  alignas(64) uint32_t words_[4 * kBlocks][kNoiseCounters];
};

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
