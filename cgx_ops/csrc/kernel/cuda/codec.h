// Buckets <-> levels, in registers (docs/wire_format.md, sections 2 to 4).
//
//   1. the range of a bucket and its record's header
//   2. the noise
//   3. eight values -> eight levels, end to end
//   4. eight levels -> eight values
#pragma once

#include <cstdint>

#include "base/philox.h"
#include "base/types.h"
#include "kernel/cuda/arithmetic.h"
#include "kernel/cuda/memory.h"

namespace cgx::device::cuda {

// ---- 1. range ----

struct Header {
  float min, step;
};

CGX_LANE Header non_finite() { return {float_of(kFloat32Nan), float_of(kFloat32Nan)}; }

struct Range {
  float lo, step;
  float inverse;  // 0: all levels are 0
};

CGX_LANE Range range_of(Extremes keys, int bits) {
  const float lo = value_of_key(keys.lowest), hi = value_of_key(keys.highest);
  const float extent = subtract(hi, lo);
  // Any NaN or infinity is at an end of the order.
  if (!is_finite(lo) || !is_finite(hi) || !is_finite(extent))
    return {non_finite().min, non_finite().step, 0.0f};
  const float step = divide(extent, static_cast<float>((1 << bits) - 1));
  const float inverse = divide(1.0f, step);
  return {lo, step, step == 0.0f || !is_finite(inverse) ? 0.0f : inverse};
}

// ---- 2. noise ----

inline constexpr int kNoiseGroup = 128;    // elements
inline constexpr int kNoiseCounters = 16;  // of a group

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
  // Hides that it is always the same seed: made once for all, the keys would take 20 registers.
  asm volatile("" : "+l"(seed));
#endif
  philox4x32_7(words, PhiloxKeys(seed), [](uint64_t word, uint32_t by) {
    return uint64_t{static_cast<uint32_t>(word)} * by;
  });
  NoiseWords result;
  CGX_UNROLL
  for (int i = 0; i < 4; ++i) result.at[i] = static_cast<uint32_t>(words[i]);
  return result;
}

// (u + 0.5) / 65536, exact: u as the upper bits of the fraction of a float in [1, 2), minus 1.
CGX_LANE float uniform(uint32_t u) {
  return subtract(float_of(0x3f800040u | (u & 0xffffu) << 7), 1.0f);
}

// Of one element.
CGX_LANE float noise_at(const Noise& noise, uint64_t element) {
  const auto in_group = static_cast<int>(element % kNoiseGroup);
  const auto counter = element / kNoiseGroup * kNoiseCounters + element % kNoiseCounters;
  const NoiseWords words = noise_words(noise, counter);
  const int half = in_group / kNoiseCounters;
  // Registers cannot be indexed.
  const uint32_t even = half & 4 ? words.at[2] : words.at[0];
  const uint32_t odd = half & 4 ? words.at[3] : words.at[1];
  return uniform((half & 2 ? odd : even) >> (16 * (half & 1)));
}

// One lane's part of the noise of whole groups from `first_group` on, to a buffer: 2 bytes an
// element, in order.
template <int kLanes>
CGX_LANE void make_noise(int lane, const Noise& noise, uint64_t first_group, int groups,
                         std::byte* buffer) {
  CGX_ROLLED
  for (int i = lane; i < groups * kNoiseCounters; i += kLanes) {
    const NoiseWords words =
        noise_words(noise, first_group * kNoiseCounters + static_cast<uint64_t>(i));
    std::byte* to = buffer + 2 * (i / kNoiseCounters * kNoiseGroup + i % kNoiseCounters);
    CGX_UNROLL
    for (int half = 0; half < 8; ++half)
      store(to + 2 * kNoiseCounters * half,
            static_cast<uint16_t>(words.at[half / 2] >> (16 * (half % 2))));
  }
}

// Of eight elements: what make_noise() left at element `at` of the buffer.
CGX_LANE Unit noise_of_unit(const std::byte* buffer, int at) {
  Unit noise;
  Words4 words;
  if (at % kUnit == 0) {
    words = load<Words4>(buffer + 2 * at);
  } else {
    CGX_UNROLL
    for (int i = 0; i < 4; ++i)
      words.at[i] = uint32_t{load<uint16_t>(buffer + 2 * (at + 2 * i))} |
                    uint32_t{load<uint16_t>(buffer + 2 * (at + 2 * i + 1))} << 16;
  }
  CGX_UNROLL
  for (int i = 0; i < kUnit; ++i) noise.at[i] = uniform(words.at[i / 2] >> (16 * (i % 2)));
  return noise;
}

// ---- 3. encode ----

// The same for all units of a bucket.
class Encoder {
 public:
  CGX_LANE Encoder(const Range& range, int bits)
      : range_(range),
        bits_(bits),
        base_(1u << bits),
        highest_(static_cast<float>((1 << bits) - 1)),
        // What four times kIntegerBits add up to in four digits; modulo 2^32, as all of it.
        excess_(kIntegerBits * (1u + base_ + base_ * base_ + base_ * base_ * base_)) {}

  // The field of a unit, its first level lowest. Levels that follow `count` are 0.
  CGX_LANE uint64_t encode(const Unit& values, const Unit& r, int count) const {
    uint32_t integers[kUnit];
    CGX_UNROLL
    for (int i = 0; i < kUnit; ++i) {
      const float scaled = multiply(subtract(values.at[i], range_.lo), range_.inverse);
      integers[i] = bits_of(floor_as_integer(smaller(add(scaled, r.at[i]), highest_)));
    }
    const uint32_t low = digits(integers), high = digits(integers + 4);
    const uint64_t field = uint64_t{high} << (4 * bits_) | low;
    return count == kUnit ? field : field & ((uint64_t{1} << (count * bits_)) - 1);
  }

 private:
  CGX_LANE uint32_t digits(const uint32_t* integers) const {
    return ((integers[3] * base_ + integers[2]) * base_ + integers[1]) * base_ + integers[0] -
           excess_;
  }

  Range range_;
  int bits_;
  uint32_t base_;
  float highest_;
  uint32_t excess_;
};

// ---- 4. decode ----

// The same for all units of a record. A level, as the highest bits of the fraction of a float in
// [1, 2), is 1 + level / 256; times 256 * step, minus 256 * step, rounded once: that is
// fp32(level * step) in one operation.
class Decoder {
 public:
  CGX_LANE Decoder(const Header& header, int bits)
      : header_(is_finite(header.min) && is_finite(header.step) ? header : non_finite()),
        bits_(bits),
        mask_(((1u << bits) - 1) << kPlace),
        scale_(multiply(header_.step, 256.0f)) {}

  CGX_LANE Unit decode(uint64_t field) const {
    const auto low = static_cast<uint32_t>(field);
    const auto high = static_cast<uint32_t>(field >> (4 * bits_));
    Unit values;
    CGX_UNROLL
    for (int i = 0; i < kUnit; ++i) {
      const uint32_t word = i < 4 ? low : high;
      // From i % 4 * bits up to kPlace: rotated, by one instruction.
      const uint32_t level = window(word, word, (i % 4 * bits_ + 32 - kPlace) % 32) & mask_;
      values.at[i] = float_of(level | 0x3f800000u);
    }
    if (is_finite(scale_)) {
      CGX_UNROLL
      for (float& x : values.at) x = add(header_.min, multiply_add(x, scale_, -scale_));
    } else {  // NaN, or a range that nearly overflows
      CGX_UNROLL
      for (float& x : values.at)
        x = add(header_.min, multiply(multiply(subtract(x, 1.0f), 256.0f), header_.step));
    }
    return values;
  }

 private:
  static constexpr int kPlace = 15;  // of 8 bits at the top of 23
  Header header_;
  int bits_;
  uint32_t mask_;
  float scale_;
};

}  // namespace cgx::device::cuda
