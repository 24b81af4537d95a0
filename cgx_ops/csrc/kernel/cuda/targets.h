// Where a bucket's values go: a record or exact values in messages, results, and what was lost into
// residuals.
//
//   1. Target: the places, and one lane's share of them
//   2. write_exact(), write_record(): a source's values into a target
//   3. move_exact(): exact values that are only moved
#pragma once

#include <cstdint>

#include "kernel/cuda/codec.h"
#include "kernel/cuda/launches.h"
#include "kernel/cuda/memory.h"
#include "kernel/cuda/tile.h"

namespace cgx::device::cuda {

// ---- 1. places ----

// Where a bucket goes, and how.
struct Target {
  std::byte* record = nullptr;     // null: nowhere
  const Copies* copies = nullptr;  // of it
  int bits = kExactBits;
  RoundingMode rounding = RoundingMode::kNearest;
  Noise noise = {};
  uint64_t first_index = 0;       // of the bucket's first value
  std::byte* result = nullptr;    // null: nowhere
  std::byte* residual = nullptr;  // null: nowhere
  float residual_scale = 1.0f;
  bool failed = false;
};

CGX_LANE float lost(float value, float decoded, const Target& target) {
  if (target.failed) return float_of(kFloat32Nan);
  const float kept = multiply(subtract(value, decoded), target.residual_scale);
  return is_finite(kept) ? kept : 0.0f;
}

// Calls visit(first_place + distance) for each place that gets a record's bytes.
template <typename Visit>
CGX_LANE void for_copies(const Copies& copies, std::byte* first_place, const Visit& visit) {
  visit(first_place);
  CGX_ROLLED
  for (int i = 0; i < copies.count; ++i) visit(first_place + copies.distance[i]);
}

// One lane's unit of result and residual.
template <typename Value>
CGX_LANE void store_outcome(const Target& target, int64_t first, int count, const Unit& values,
                            const Unit& decoded, std::byte* scratch) {
  constexpr int kWidth = sizeof(typename Value::Bits);
  if (target.result) store_unit<Value>(target.result + first * kWidth, decoded, count, scratch);
  if (!target.residual) return;
  Unit residual;
  CGX_UNROLL
  for (int i = 0; i < kUnit; ++i) residual.at[i] = lost(values.at[i], decoded.at[i], target);
  store_unit<Value>(target.residual + first * kWidth, residual, count, scratch);
}

// ---- 2. values that are computed ----

// Values rounded to the dtype: into a message, results, or both.
template <typename Value, typename Group, typename Source>
CGX_LANE void write_exact(Group& group, std::byte* buffer, const Target& target, int64_t numel,
                          const Source& source) {
  constexpr int kWidth = sizeof(typename Value::Bits);
  typename Group::template Lanes<Tile> tile;
  for (int64_t start = 0; start < numel; start += Layout<Group>::kTile) {
    const auto length = static_cast<int>(at_most(Layout<Group>::kTile, numel - start));
    source(tile, start, length);
    group.each([&](int lane) {
      std::byte* scratch = buffer + Layout<Group>::kScratchAt + lane * kUnitBytes<Value>;
      for_units<Group::kLanes>(lane, length, [&](int u, int at, int count) {
        const Unit& values = tile[lane].units[u];
        Unit decoded;
        CGX_UNROLL
        for (int i = 0; i < kUnit; ++i) decoded.at[i] = Value::widen(Value::round(values.at[i]));
        if (target.record)
          for_copies(*target.copies, target.record + (start + at) * kWidth,
                     [&](std::byte* to) { store_unit<Value>(to, values, count, scratch); });
        store_outcome<Value>(target, start + at, count, values, decoded, scratch);
      });
    });
  }
}

// A record, 1 to 8 bits. The source is asked a second time for a tile of a long bucket before
// anything of that tile is written: so it may read what the target overwrites.
template <typename Value, typename Group, typename Source>
CGX_LANE void write_record(Group& group, std::byte* buffer, const Target& target, int64_t numel,
                           const Source& source) {
  constexpr int kTile = Layout<Group>::kTile;
  typename Group::template Lanes<Tile> tile;
  typename Group::template Lanes<Extremes> keys;
  group.each([&](int lane) { keys[lane] = {INT32_MAX, INT32_MIN}; });
  for (int64_t start = 0; start < numel; start += kTile) {
    const auto length = static_cast<int>(at_most(kTile, numel - start));
    source(tile, start, length);
    group.each([&](int lane) {
      for_units<Group::kLanes>(lane, length, [&](int u, int, int) {
        CGX_UNROLL
        for (const float x : tile[lane].units[u].at) {
          const int32_t key = key_of(x);
          keys[lane].lowest = key < keys[lane].lowest ? key : keys[lane].lowest;
          keys[lane].highest = key > keys[lane].highest ? key : keys[lane].highest;
        }
      });
    });
  }

  const Range range = range_of(group.extremes(keys), target.bits);
  const Encoder encoder(range, target.bits);
  Header header{range.lo, range.step};
  bool flat = range.inverse == 0.0f;  // all levels are 0
  float r = 0.5f;
  if (target.rounding == RoundingMode::kShift && !flat) {
    r = noise_at(target.noise, target.first_index);
    header.min = add(range.lo, multiply(subtract(0.5f, r), range.step));
    if (!is_finite(header.min)) {
      header = non_finite();
      flat = true;
    }
  }
  const bool noisy = target.rounding == RoundingMode::kStochastic && !flat;

  std::byte* stage = buffer + Layout<Group>::kStageAt;
  for (int64_t start = 0; start < numel; start += kTile) {
    const auto length = static_cast<int>(at_most(kTile, numel - start));
    if (numel > kTile) source(tile, start, length);
    const uint64_t index = target.first_index + static_cast<uint64_t>(start);
    const auto in_group = static_cast<int>(index % kNoiseGroup);
    if (noisy) {
      const int groups = (in_group + length + kNoiseGroup - 1) / kNoiseGroup;
      group.each([&](int lane) {
        make_noise<Group::kLanes>(lane, target.noise, index / kNoiseGroup, groups, buffer);
      });
    }
    const int field_at = start == 0 ? static_cast<int>(kHeaderBytes) : 0;
    group.each([&](int lane) {
      if (field_at > 0 && lane == 0) {
        store(stage, header.min);
        store(stage + 4, header.step);
      }
      std::byte* scratch = buffer + Layout<Group>::kScratchAt + lane * kUnitBytes<Value>;
      for_units<Group::kLanes>(lane, length, [&](int u, int at, int count) {
        const Unit& values = tile[lane].units[u];
        uint64_t field = 0;
        if (noisy) {
          field = encoder.encode(values, noise_of_unit(buffer, in_group + at), count);
        } else if (!flat) {
          field = encoder.encode(values, {{r, r, r, r, r, r, r, r}}, count);
        }
        store_field(stage + field_at + at / kUnit * target.bits, field, target.bits);
        if (!target.result && !target.residual) return;
        Unit decoded = Decoder(header, target.bits).decode(field);
        CGX_UNROLL
        for (float& x : decoded.at) x = with_one_nan(x);
        store_outcome<Value>(target, start + at, count, values, decoded, scratch);
      });
    });
    group.each([&](int lane) {
      const int bytes = field_at + static_cast<int>(field_bytes(length, target.bits));
      std::byte* to = target.record + (start == 0 ? 0 : kHeaderBytes + start / kUnit * target.bits);
      for_copies(*target.copies, to,
                 [&](std::byte* place) { copy_out<Group::kLanes>(lane, place, stage, 0, bytes); });
    });
  }
}

// ---- 3. values that are moved ----

// Exact values that are only moved keep their bits: places(visit) calls visit(place) for each
// place that gets them.
template <typename Value, typename Group, typename Places>
CGX_LANE void move_exact(Group& group, std::byte* buffer, const std::byte* values, int64_t numel,
                         bool failed, const Places& places) {
  constexpr int kWidth = sizeof(typename Value::Bits);
  for (int64_t start = 0; start < numel; start += Layout<Group>::kTile) {
    const auto length = static_cast<int>(at_most(Layout<Group>::kTile, numel - start));
    const std::byte* from = values + start * kWidth;
    const int at = failed ? 0 : misalignment(from, 16);
    group.each([&](int lane) {
      if (failed) {
        CGX_ROLLED
        for (int i = lane; i < length; i += Group::kLanes)
          store(buffer + i * kWidth, Value::round(float_of(kFloat32Nan)));
      } else {
        start_copy_in<Group::kLanes>(lane, buffer, from, length * kWidth);
        finish_copies();
      }
    });
    group.each([&](int lane) {
      places([&](std::byte* to) {
        copy_out<Group::kLanes>(lane, to + start * kWidth, buffer, at, length * kWidth);
      });
    });
  }
}

}  // namespace cgx::device::cuda
