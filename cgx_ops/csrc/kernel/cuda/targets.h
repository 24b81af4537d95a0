// Targets of a bucket's values: a record or uncompressed values in messages, results, and errors in
// residuals.
//
//   1. Target: the addresses, and a lane's part of writing
//   2. write_values(): writes a source's values, uncompressed or in 16 bits
//   3. write_record(): writes a source's values as a record
//   4. move_exact(): copies uncompressed values
#pragma once

#include <cstdint>

#include "kernel/cuda/addresses.h"
#include "kernel/cuda/blocks.h"
#include "kernel/cuda/formats.h"
#include "kernel/cuda/launches.h"
#include "kernel/cuda/memory.h"
#include "kernel/cuda/noise.h"
#include "kernel/cuda/rotate.h"
#include "kernel/cuda/tile.h"
#include "kernel/cuda/trits.h"
#include "kernel/cuda/uniform.h"

namespace cgx::device::cuda {

// ---- 1. addresses ----

// Where and how a bucket is written.
struct Target {
  std::byte* record = nullptr;     // may be null
  const Copies* copies = nullptr;  // of the record
  Coding coding = {};
  RoundingMode rounding = RoundingMode::kNearest;
  Noise noise = {};
  uint64_t first_index = 0;       // of the bucket's first value
  std::byte* result = nullptr;    // may be null
  std::byte* residual = nullptr;  // may be null
  float residual_scale = 1.0f;
  bool failed = false;
};

template <typename Value>
CGX_LANE float error_of(float value, float decoded, const Target& target) {
  if (target.failed) return float_of(kFloat32Nan);
  return kept_in_residual<Value>(multiply(subtract(value, decoded), target.residual_scale));
}

// A lane's unit of result and residual.
template <typename Value>
CGX_LANE void store_outcome(const Target& target, int64_t first, int count, const Unit& values,
                            const Unit& decoded, std::byte* scratch) {
  constexpr int kWidth = sizeof(typename Value::Bits);
  if (target.result) store_unit<Value>(target.result + first * kWidth, decoded, count, scratch);
  if (!target.residual) return;
  Unit residual;
  CGX_UNROLL
  for (int i = 0; i < kUnit; ++i)
    residual.at[i] = error_of<Value>(values.at[i], decoded.at[i], target);
  store_unit<Value>(target.residual + first * kWidth, residual, count, scratch);
}

// ---- 2. values without a grid ----

// Generates the noise of a tile, which begins at the bucket's element `start`, in the buffer.
// Returns the position of the first element's noise.
template <typename Group>
CGX_LANE int make_noise_of_tile(Group& group, std::byte* buffer, const Target& target,
                                int64_t start, int length) {
  const uint64_t index = target.first_index + static_cast<uint64_t>(start);
  const auto in_block = static_cast<int>(index % kNoiseBlock);
  const int blocks = (in_block + length + kNoiseBlock - 1) / kNoiseBlock;
  group.each([&](int lane) {
    make_noise<Group::kLanes>(lane, target.noise, index / kNoiseBlock, blocks, buffer);
  });
  return in_block;
}

// Writes values rounded to the dtype or (in_halves) to 16 bits, to a message, results, or both.
template <typename Value, typename Group, typename Source>
CGX_LANE void write_values(Group& group, std::byte* buffer, const Target& target, int64_t numel,
                           const Source& source, bool in_halves) {
  using Half = HalfOf<Value>;
  constexpr int kWidth = sizeof(typename Value::Bits);
  const bool noisy = in_halves && target.rounding == RoundingMode::kStochastic;
  typename Group::template Lanes<Tile> tile;
  for (int64_t start = 0; start < numel; start += Layout<Group>::kTile) {
    const auto length = static_cast<int>(at_most(Layout<Group>::kTile, numel - start));
    source(tile, start, length);
    const int noise_at = noisy ? make_noise_of_tile(group, buffer, target, start, length) : 0;
    group.each([&](int lane) {
      std::byte* scratch = buffer + Layout<Group>::kScratchAt + lane * kUnitBytes<Float32>;
      for_units<Group::kLanes>(lane, length, [&](int u, int at, int count) {
        const Unit& values = tile[lane].units[u];
        const Words4 drawn = noisy ? drawn_of_unit(buffer, noise_at + at) : Words4{};
        Unit decoded;
        CGX_UNROLL
        for (int i = 0; i < kUnit; ++i) {
          const float x = values.at[i];
          if (in_halves) {
            decoded.at[i] =
                Half::widen(noisy ? round_noisily(Half{}, x, drawn_at(drawn, i)) : Half::round(x));
          } else {
            decoded.at[i] = Value::widen(Value::round(x));
          }
        }
        for_copies(target.copies, moved(target.record, (start + at) * (in_halves ? 2 : kWidth)),
                   [&](std::byte* to) {
                     if (in_halves) {
                       store_unit<Half>(to, decoded, count, scratch);
                     } else {
                       store_unit<Value>(to, values, count, scratch);
                     }
                   });
        store_outcome<Value>(target, start + at, count, values, decoded, scratch);
      });
    });
  }
}

// ---- 3. records ----

// The header of a record, and the parameters of its field.
template <typename Format>
struct Making {
  Header header;
  typename Format::Encoder encoder;
  bool flat;  // all codes are equal
  bool noisy;
  float rounder;  // added to all values, unless there is noise

  CGX_LANE Making(const Grid& grid, const Coding& coding, const Target& target)
      : header(grid.header), encoder(grid, coding), flat(grid.inverse == 0.0f), rounder(0.5f) {
    const bool moves = coding.format == BucketFormat::kUniform;
    if (target.rounding == RoundingMode::kShift && moves && !flat) {
      rounder = noise_of_element(target.noise, target.first_index);
      header.first = add(header.first, multiply(subtract(0.5f, rounder), header.second));
      if (!is_finite(header.first)) {
        header = non_finite();
        flat = true;
      }
    }
    noisy = target.rounding == RoundingMode::kStochastic && !flat;
  }
};

// Writes a tile's part of a record. If result or residual is needed, the tile of a rotated bucket
// holds the decoded field afterwards.
template <typename Value, typename Format, typename Group>
CGX_LANE void write_tile(Group& group, std::byte* buffer, const Target& target,
                         const Coding& coding, const Making<Format>& making, int64_t start,
                         int length, typename Group::template Lanes<Tile>& tile) {
  constexpr bool kBlocks = Format::kFormats == Formats::kBlocks;
  const bool trits = !kBlocks && coding.format == BucketFormat::kTernary;
  // The field is built after the room for the header. Trits are packed from bytes that are built
  // there.
  std::byte* const stage = buffer + Layout<Group>::kStageAt;
  std::byte* const made = trits ? buffer + Layout<Group>::kScratchAt : stage;
  const int noise_at = making.noisy ? make_noise_of_tile(group, buffer, target, start, length) : 0;
  typename Group::template Lanes<ScalesOfUnits> scales;
  if constexpr (kBlocks)
    find_scales(group, buffer + Layout<Group>::kScratchAt, making.encoder, coding, length, tile,
                scales);
  group.each([&](int lane) {
    if (start == 0 && lane == 0 && !trits) store_header(made, making.header, coding);
    std::byte* scratch = buffer + Layout<Group>::kScratchAt + lane * kUnitBytes<Value>;
    for_units<Group::kLanes>(lane, length, [&](int u, int at, int count) {
      const Unit& values = tile[lane].units[u];
      uint64_t field = trits ? 0x5555 : 0;
      if (!making.flat) {
        const float r = making.rounder;
        Unit noise{{r, r, r, r, r, r, r, r}};
        if (making.noisy) noise = noise_of_unit(buffer, noise_at + at);
        if constexpr (kBlocks)
          field = making.encoder.encode(values, noise, count, scales[lane].at[u], making.noisy);
        else
          field = making.encoder.encode(values, noise, count);
      }
      std::byte* const to = stage + kHeaderRoom;
      if constexpr (kBlocks) {
        store_in_block(to, at, field, scales[lane].at[u].byte, coding);
      } else if (trits) {
        store_field(to + at, spread_trits(field), kUnit);
      } else {
        store_field(to + at / kUnit * coding.bits, field, coding.bits);
      }
      if (!target.result && !target.residual) return;
      const typename Format::Decoder decoder(making.header, coding);
      Unit decoded;
      if constexpr (kBlocks)
        decoded = decoder.decode(field, scales[lane].at[u].value);
      else
        decoded = decoder.decode(field);
      CGX_UNROLL
      for (float& x : decoded.at) x = with_one_nan(x);
      if (coding.rotation_log != 0) {
        tile[lane].units[u] = decoded;
      } else {
        store_outcome<Value>(target, start + at, count, values, decoded, scratch);
      }
    });
  });
  if (trits) {
    group.each([&](int lane) {
      pack_trits<Group::kLanes>(lane, stage + kHeaderRoom, length, made + kHeaderRoom);
      if (start == 0 && lane == 0) store_header(made, making.header, coding);
    });
  }
  group.each([&](int lane) {
    const auto header_size = static_cast<int>(header_bytes(coding));
    const int begin = start == 0 ? kHeaderRoom - header_size : kHeaderRoom;
    const int bytes = kHeaderRoom + static_cast<int>(field_bytes(length, coding)) - begin;
    const int64_t to = start == 0 ? 0 : header_size + field_bytes(start, coding);
    for_copies(target.copies, moved(target.record, to),
               [&](std::byte* place) { copy_out<Group::kLanes>(lane, place, made, begin, bytes); });
  });
}

// Stores the error and the result of a rotated bucket, from the decoded and rotated-back field.
template <typename Value, typename Group>
CGX_LANE void store_rotated_outcome(Group& group, std::byte* buffer, const Target& target,
                                    int numel, typename Group::template Lanes<Tile>& values,
                                    typename Group::template Lanes<Tile>& decoded) {
  group.each([&](int lane) {
    std::byte* scratch = buffer + Layout<Group>::kScratchAt + lane * kUnitBytes<Value>;
    for_units<Group::kLanes>(lane, numel, [&](int u, int at, int count) {
      Unit& unit = decoded[lane].units[u];
      CGX_UNROLL
      for (float& x : unit.at) x = with_one_nan(x);
      store_outcome<Value>(target, at, count, values[lane].units[u], unit, scratch);
    });
  });
}

// Writes a record in several passes over the values: some measure, the last writes. For a long
// bucket, the source is read again for each tile before the tile is written, so it may read memory
// that the target overwrites. For a rotated bucket it is read again to compute the errors.
template <typename Value, typename Format, typename Group, typename Source>
CGX_LANE void write_record(Group& group, std::byte* buffer, const Target& target, int64_t numel,
                           const Source& source) {
  constexpr int kTile = Layout<Group>::kTile;
  using Measure = typename Format::template Measure<Group>;
  constexpr int kWrites = Measure::kPasses, kKeeps = kWrites + 1;  // passes
  const Coding coding = Format::known(target.coding);
  const bool rotated = coding.rotation_log != 0;
  const bool keeps = rotated && (target.result || target.residual);
  typename Group::template Lanes<Tile> tile, decoded;
  Measure measure(group, buffer, coding, numel);
  CGX_ROLLED
  for (int pass = 0; pass <= (keeps ? kKeeps : kWrites); ++pass) {
    if (pass < kWrites && !measure.needs(pass)) continue;
    const bool by_groups = coding.format == BucketFormat::kTernary && numel > kTile;
    const int step = pass == kWrites && by_groups ? kTile / kTrits * kTrits : kTile;
    for (int64_t start = 0; start < numel; start += step) {
      const auto length = static_cast<int>(at_most(step, numel - start));
      if (pass == 0 || pass == kKeeps || numel > kTile) {
        source(tile, start, length);
        if (rotated && pass != kKeeps)
          rotate_tile(group, buffer, tile, length, coding.rotation_log);
      }
      if (pass < kWrites) {
        measure.inspect(pass, tile, length);
      } else if (pass == kWrites) {
        const Making<Format> making(measure.grid(), coding, target);
        write_tile<Value>(group, buffer, target, coding, making, start, length, tile);
        if (keeps) {
          rotate_tile</*kBack=*/true>(group, buffer, tile, length, coding.rotation_log);
          group.each([&](int lane) { decoded[lane] = tile[lane]; });
        }
      } else {
        store_rotated_outcome<Value>(group, buffer, target, length, tile, decoded);
      }
    }
  }
}

// ---- 4. copies ----

// Uncompressed values that are only moved keep their bits. destinations(visit) calls visit(address)
// for each destination.
template <typename Value, typename Group, typename Destinations>
CGX_LANE void move_exact(Group& group, std::byte* buffer, const std::byte* values, int64_t numel,
                         bool failed, const Destinations& destinations) {
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
      destinations([&](std::byte* to) {
        copy_out<Group::kLanes>(lane, to + start * kWidth, buffer, at, length * kWidth);
      });
    });
  }
}

}  // namespace cgx::device::cuda
