#include "compressor/entropy_search.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>

#include "kernel/kernels.h"

namespace cgx {
namespace {

constexpr int64_t kBillion = 1000000000;
constexpr int64_t kMostSample = 4096;  // values
constexpr int64_t kGroup = 16;
constexpr int64_t kBit = int64_t{1} << kCostBits;

// The cost of at most 4096 symbols with their own frequencies.
template <typename Container>
int64_t own_cost(const Container& counts, int64_t total) {
  int64_t cost = 0;
  if (total == 0) return 0;
  const int64_t least = cost_of(static_cast<int>(total));
  for (const uint32_t count : counts)
    if (count != 0) cost += int64_t{count} * (cost_of(static_cast<int>(count)) - least);
  return cost;
}

}  // namespace

float step_of_key(int64_t key) { return std::bit_cast<float>(static_cast<uint32_t>(key << 8)); }

int64_t key_of_step(float step) { return std::bit_cast<uint32_t>(step) >> 8; }

void EntropyLevels::encode(const float* values, int64_t numel, int64_t stride,
                           const EntropyGrid& grid) {
  const size_t room = (numel + kGroup - 1) / kGroup * kGroup;
  if (symbols.size() < room) symbols.resize(room), low.resize(room), extra.resize(room);
  extras = kernels().entropy_symbols(values, numel, stride, grid, symbols.data(), low.data(),
                                     extra.data());
  kernels().count_low_symbols(symbols.data(), numel, counts.data());
}

int64_t EntropyLevels::extra_bits() const {
  int64_t bits = 0;
  for (int s = kDirectSymbols; s < kEntropySymbols; ++s) bits += counts[s] * extra_bits_of(s);
  return bits;
}

int64_t EntropySearch::Bracket::next(int64_t key, int64_t above, int64_t move) {
  if (above > 0)
    lowest = key, fine = true;
  else
    highest = key, coarse = true;
  const int64_t moved = key + std::clamp(move, -4 * kOctave, 4 * kOctave);
  if (moved <= lowest) return fine ? (lowest + highest) / 2 : lowest;
  if (moved >= highest) return coarse ? (lowest + highest) / 2 : highest;
  return moved;
}

EntropySearch::EntropySearch(const float* values, int64_t numel, uint32_t largest, int64_t rate,
                             bool dithered, int64_t wanted, int64_t overhead)
    : values_(values), numel_(numel), wanted_(wanted) {
  offset_ = 128 - std::min<int64_t>(64, 25600000000 / rate);
  grid_.offset = static_cast<float>(offset_) / 256;
  grid_.dithered = dithered;
  grid_.width = static_cast<int>(std::max<int64_t>(0, rate / kBillion - 4));

  const int64_t coarsest = dithered ? 7 : 1;
  highest_ = std::clamp<int64_t>((largest >> 8) + coarsest * kOctave + 1, kLowestKey, kHighestKey);

  stride_ = kGroup * (((numel + kMostSample - 1) / kMostSample) | 1);
  if (stride_ == kGroup) {
    sample_.resize(numel);
    std::memcpy(sample_.data(), values, numel * sizeof(float));
  } else {
    sample_.reserve(kMostSample);
    for (int64_t first = 0; first + kGroup <= numel; first += stride_) {
      sample_.resize(sample_.size() + kGroup);
      std::memcpy(sample_.data() + sample_.size() - kGroup, values + first, kGroup * sizeof(float));
    }
  }
  int64_t sum = 0, count = 0;
  for (const float value : sample_) {
    const int64_t key = (std::bit_cast<uint32_t>(value) & 0x7fffffff) >> 8;
    if (key >= kLowestKey) sum += key, ++count;
  }
  const int64_t n = sample_size();
  nonzero_ = std::max<int64_t>({count, n / 64, 1});
  const int64_t mean = count > 0 ? sum / count : highest_;
  lowest_ = std::max(kLowestKey, mean - 30 * kOctave);
  const int64_t each = std::min(20 * kBillion, rate * n / nonzero_);
  first_ = std::clamp(mean + 3 * kOctave - each * kOctave / kBillion, lowest_, highest_);
  sample_wanted_ = std::max(wanted - overhead, wanted / 4) * n * kBit / numel;
}

EntropyGrid EntropySearch::grid(int64_t key) const {
  EntropyGrid grid = grid_;
  grid.step = step_of_key(key);
  return grid;
}

int64_t EntropySearch::sample_cost(int64_t key) {
  const int64_t n = sample_size();
  trial_.encode(sample_.data(), n, stride_, grid(key));
  return own_cost(trial_.counts, n) + (n * grid_.width + trial_.extra_bits()) * kBit;
}

int64_t EntropySearch::search_sample(int64_t key) {
  Bracket bracket{lowest_, highest_};
  for (int turn = 0; turn < kMostTurns; ++turn) {
    const int64_t above = sample_cost(key) - sample_wanted_;
    if (std::abs(above) <= sample_size() * kBit >> 7) break;
    key = bracket.next(key, above, floor_div(above >> 9, nonzero_));
    if (bracket.ended(key)) break;
  }
  return key;
}

// The cost of uncoded low bits, in the two cells next to 0 of the last trial.
int64_t EntropySearch::low_bits_loss() const {
  std::array<std::array<uint32_t, 16>, 2> cells{};
  for (int64_t i = 0; i < sample_size(); ++i)
    if (trial_.symbols[i] < 2) ++cells[trial_.symbols[i]][trial_.low[i]];
  int64_t loss = 0;
  for (int cell = 0; cell < 2; ++cell) {
    const int64_t total = trial_.counts[cell];
    loss += total * grid_.width * kBit - own_cost(cells[cell], total);
  }
  return loss;
}

// Reduces the width until uncoded low bits cost little; returns the key.
int64_t EntropySearch::choose_width(int64_t key) {
  key = search_sample(key);
  while (grid_.width > 0) {
    sample_cost(key);
    const int64_t allowed = (sample_size() * kBit >> 8) + 3 * (kBit << (grid_.width - 1));
    if (low_bits_loss() <= allowed) break;
    --grid_.width;
    key = search_sample(key);
  }
  return key;
}

// How much more the sample costs if the step is an eighth smaller.
int64_t EntropySearch::slope_at(int64_t key) {
  const int64_t finer = key_of_step(step_of_key(key) * 0.875f);
  const int64_t cost = sample_cost(std::max(kLowestKey, finer));
  return std::max(cost - sample_cost(key), nonzero_ * kBit >> 6);
}

int EntropySearch::shift_at(int64_t key) const {
  const EntropyGrid grid = this->grid(key);
  const float inverse = 1.0f / grid.step;
  int32_t count = 0, fractions = 0;  // of at most kMostSample values, so vectors of 32 bits suffice
  for (const float value : sample_) {
    const float magnitude = std::bit_cast<float>(std::bit_cast<uint32_t>(value) & 0x7fffffff);
    const float scaled = magnitude * inverse;
    const float v = scaled + grid.offset;
    const int32_t used = -(static_cast<int32_t>(v >= 1) & static_cast<int32_t>(v < 32768));
    const float limited = v < 32768 ? v : 32768;
    const int32_t whole = static_cast<int32_t>(limited);
    const float fraction = (limited - static_cast<float>(whole)) * 256;
    count -= used;
    fractions += static_cast<int32_t>(fraction) & used;
  }
  if (count < 16) return 0;
  return static_cast<int>(
      std::clamp<int64_t>(floor_div(count * offset_ - fractions, int64_t{count}), -128, 127));
}

}  // namespace cgx
