// The search for the step of `entropy` with which a block has the desired size. Costs are integers,
// so all processors take the same decisions (docs/reference/entropy_blocks.md, section 5).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "compressor/frequencies.h"
#include "kernel/entropy.h"

namespace cgx {

// The key of a step: the upper 24 bits of its fp32 number. Keys are in the order of the steps.
inline constexpr int64_t kOctave = 1 << 15;  // the distance if steps differ by a factor of 2
inline constexpr int64_t kLowestKey = 0x8000, kHighestKey = 0x7f7fff;
float step_of_key(int64_t key);
int64_t key_of_step(float step);

inline int64_t floor_div(int64_t a, int64_t b) {
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

// The levels of values as symbols, low bits and extra bits. Whole groups of sixteen have room.
class EntropyLevels {
 public:
  void encode(const float* values, int64_t numel, int64_t stride, const EntropyGrid& grid);
  int64_t extra_bits() const;

  std::vector<uint8_t> symbols, low;
  std::vector<uint32_t> extra;
  int64_t extras = 0;  // used elements of `extra`
  Counts counts{};
};

class EntropySearch {
 public:
  // `values` are finite, and not all equal. `largest`: the bits of their largest magnitude.
  // `wanted`: the desired size in bits; `overhead`: about the part of it without the values' cost.
  EntropySearch(const float* values, int64_t numel, uint32_t largest, int64_t rate, bool dithered,
                int64_t wanted, int64_t overhead);

  // Returns the key. size(levels): about the size of a block in bits.
  template <typename Size>
  int64_t run(EntropyLevels& levels, const Size& size) {
    int64_t key = choose_width(first_);
    const int64_t slope = slope_at(key) * numel_ / sample_size() >> 10;
    Bracket bracket{lowest_, highest_};
    const int64_t near = std::max<int64_t>(16, numel_ >> 8);
    for (int turn = 0; turn < kMostTurns; ++turn) {
      levels.encode(values_, numel_, 16, grid(key));
      encoded_ = key;
      const int64_t above = size(levels) - wanted_;
      if (above <= near && above >= -near * (turn == 0 ? 1 : 2)) return key;
      const int64_t mantissa = kOctave + key % kOctave;
      key = bracket.next(key, above, floor_div(above * mantissa * (1 << 11), slope));
      if (bracket.ended(key)) break;
    }
    return bracket.coarse ? bracket.highest : key;
  }

  // For nearest rounding: the mean distance of the sample's magnitudes from their levels, times
  // 256.
  int shift_at(int64_t key) const;

  // The grid of a key, without noise and without a shift.
  EntropyGrid grid(int64_t key) const;
  int64_t highest() const { return highest_; }
  // The key with which run() encoded the levels last.
  int64_t encoded() const { return encoded_; }

 private:
  static constexpr int kMostTurns = 8;

  // The keys between the finest and the coarsest that are possible or were tried.
  struct Bracket {
    int64_t lowest, highest;
    bool fine = false, coarse = false;  // whether the lowest and the highest were tried

    int64_t next(int64_t key, int64_t above, int64_t move);
    bool ended(int64_t key) const { return key == lowest || key == highest; }
  };

  int64_t sample_size() const { return static_cast<int64_t>(sample_.size()); }
  int64_t sample_cost(int64_t key);
  int64_t low_bits_loss() const;
  int64_t search_sample(int64_t key);
  int64_t choose_width(int64_t key);
  int64_t slope_at(int64_t key);

  const float* const values_;
  const int64_t numel_, wanted_;
  EntropyGrid grid_;
  int64_t offset_;  // of the grid, times 256
  std::vector<float> sample_;
  int64_t stride_ = 16;
  int64_t nonzero_ = 0;  // of the sample
  int64_t lowest_, highest_, first_, sample_wanted_, encoded_ = 0;
  EntropyLevels trial_;
};

}  // namespace cgx
