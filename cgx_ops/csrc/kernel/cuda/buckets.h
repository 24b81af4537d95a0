// What a group does with one bucket: the bodies of the kernels.
//
//   1. a group's buffer, a launch's place
//   2. sources: values of this rank, or sums of all ranks, a tile at a time in the lanes' registers
//   3. values -> record (and what it decodes to, and what it lost)
//   4. run_bucket(), of an Encode, a Reduce, a Decode
#pragma once

#include <cstdint>

#include "base/seeds.h"
#include "kernel/cuda/codec.h"
#include "kernel/cuda/launches.h"
#include "kernel/cuda/memory.h"
#include "kernel/cuda/work.h"

namespace cgx::device::cuda {

// ---- 1. places ----

// Shared memory of a group: what arrives, and later noise, a part of a record, and lanes' scratch.
template <typename Group>
struct Layout {
  static constexpr int kTile = tile_numel(Group::kLanes);
  static constexpr int kNoise = 2 * (kTile + kNoiseGroup);
  static constexpr int kStage = static_cast<int>(kHeaderBytes) + kTile + kWindow + 8;
  static constexpr int kStageAt = kNoise, kScratchAt = kNoise + kStage;
  // The values of a bucket of 512 and seven messages of 4 bits fit into 8 bytes a value.
  static constexpr int kArriving = (Group::kLanes == kWarpLanes ? 32 : 21) * kTile / 4;
  static constexpr int kBytes = kArriving + kWindow;
  static_assert(kStageAt % 16 == 0 && kScratchAt % 16 == 0);
  static_assert(kScratchAt + 32 * Group::kLanes <= kArriving && 4 * kTile + 32 <= kArriving);
};

// Where this exchange's messages lie, and whether there is one.
struct Place {
  int64_t read, write;  // bytes from the addresses in the launch
  bool failed;
};
CGX_LANE Place place_of(const Regions& regions, const uint32_t* fault) {
  const uint64_t done = regions.done ? *regions.done : 0;
  const int64_t bytes = regions.done ? regions.bytes : 0;
  return {done % 2 ? bytes : 0, done % 2 ? 0 : bytes, fault && *fault != 0};
}

struct Tile {
  Unit units[kLaneUnits];
};

// Calls visit(u, at, count) for each unit of a tile of `numel` values that is this lane's: its
// place in the tile, and how many values it has, 1 to 8.
template <int kLanes, typename Visit>
CGX_LANE void for_units(int lane, int numel, const Visit& visit) {
  CGX_UNROLL
  for (int u = 0; u < kLaneUnits; ++u) {
    const int at = kUnit * (u * kLanes + lane);
    if (at < numel) visit(u, at, numel - at < kUnit ? numel - at : kUnit);
  }
}

template <typename Group>
CGX_LANE void fill_with_nan(Group& group, typename Group::template Lanes<Tile>& tile) {
  group.each([&](int lane) {
    CGX_UNROLL
    for (Unit& unit : tile[lane].units) CGX_UNROLL
    for (float& x : unit.at) x = float_of(kFloat32Nan);
  });
}

// ---- 2. sources ----
//
// source(tile, start, numel) fills a tile with fp32 values of a bucket from `start` on. In a last
// unit that is not whole its first value is repeated.

template <typename Value, typename Group>
struct OwnValues {
  Group& group;
  std::byte* buffer;
  const std::byte* values;  // of the bucket
  bool failed;

  CGX_LANE void operator()(typename Group::template Lanes<Tile>& tile, int64_t start,
                           int numel) const {
    constexpr int kWidth = sizeof(typename Value::Bits);
    const std::byte* from = values + start * kWidth;
    if (failed) return fill_with_nan(group, tile);
    if (misalignment(from, 16) == 0 && numel % kUnit == 0) {
      group.each([&](int lane) {
        for_units<Group::kLanes>(lane, numel, [&](int u, int at, int) {
          tile[lane].units[u] = load_unit<Value>(from + at * kWidth);
        });
      });
      return;
    }
    group.each([&](int lane) {
      start_copy_in<Group::kLanes>(lane, buffer, from, numel * kWidth);
      finish_copies();
    });
    group.each([&](int lane) {
      for_units<Group::kLanes>(lane, numel, [&](int u, int at, int count) {
        tile[lane].units[u] =
            load_unit_of_buffer<Value>(buffer, misalignment(from, 16) + at * kWidth, count);
      });
    });
  }
};

// Of all ranks, in their order. Messages arrive in the buffer, as many at once as it holds.
template <typename Value, typename Group>
struct Sums {
  static constexpr int kWidth = sizeof(typename Value::Bits);

  Group& group;
  std::byte* buffer;
  const std::byte* own_values;  // of the bucket
  const std::byte* message;     // of rank 0, from the bucket on
  int64_t stride;
  int size, own, bits;
  Op op;
  float divisor;
  bool failed;

  CGX_LANE void operator()(typename Group::template Lanes<Tile>& tile, int64_t start,
                           int numel) const {
    if (failed) return fill_with_nan(group, tile);
    group.each([&](int lane) {
      CGX_UNROLL
      for (Unit& unit : tile[lane].units) CGX_UNROLL
      for (float& x : unit.at) x = -0.0f;  // -0 + x is x
    });
    for (int first = 0, last = 0; first < size; first = last) {
      group.each([&](int lane) {
        int at = 0;
        CGX_ROLLED
        for (last = first; last < size; ++last) {
          const Arrival from = arrival(last, start, numel);
          if (at + from.in_buffer > Layout<Group>::kArriving) break;
          if (from.apart) start_copy_in<Group::kLanes>(lane, buffer + at, from.header, kHeader);
          start_copy_in<Group::kLanes>(lane, buffer + at + from.apart, from.run, from.bytes);
          at += from.in_buffer;
        }
        finish_copies();
      });
      group.each([&](int lane) {
        int at = 0;
        CGX_ROLLED
        for (int rank = first; rank < last; ++rank) {
          const Arrival from = arrival(rank, start, numel);
          add_arrival(from, at, rank == 0, lane, numel, &tile[lane]);
          at += from.in_buffer;
        }
      });
    }
    // A NaN that arithmetic gives is one NaN: once is enough, at the end.
    const bool only_moved = size == 1 && (own == 0 || bits == kExactBits) && op != Op::kAvg;
    group.each([&](int lane) {
      for_units<Group::kLanes>(lane, numel, [&](int u, int, int count) {
        Unit& unit = tile[lane].units[u];
        CGX_UNROLL
        for (int i = 0; i < kUnit; ++i) {
          float& x = unit.at[i];
          if (op == Op::kAvg) x = divide(x, divisor);
          if (!only_moved) x = with_one_nan(x);
          if (i >= count) x = unit.at[0];
        }
      });
    });
  }

 private:
  static constexpr int kHeader = static_cast<int>(kHeaderBytes);

  // One rank's part of a tile, as it lies in global memory and in the buffer.
  struct Arrival {
    const std::byte* header;  // of the record; null: exact values
    const std::byte* run;
    int bytes;
    int apart;      // bytes of the buffer before the run: the header's, unless it begins the run
    int in_buffer;  // bytes, of all
  };

  CGX_LANE Arrival arrival(int rank, int64_t start, int numel) const {
    const std::byte* record = message + rank * stride;
    if (rank == own || bits == kExactBits) {
      const std::byte* run = (rank == own ? own_values : record) + start * kWidth;
      return {nullptr, run, numel * kWidth, 0, bytes_in_buffer(run, numel * kWidth)};
    }
    const int field = static_cast<int>(field_bytes(numel, bits));
    if (start == 0)
      return {record, record, kHeader + field, 0, bytes_in_buffer(record, kHeader + field)};
    const std::byte* run = record + kHeaderBytes + start / kUnit * bits;
    const int apart = bytes_in_buffer(record, kHeader);
    return {record, run, field, apart, apart + bytes_in_buffer(run, field)};
  }

  CGX_LANE void add_arrival(const Arrival& from, int at, bool is_first, int lane, int numel,
                            Tile* tile) const {
    const int run_at = at + from.apart + misalignment(from.run, 16);
    if (!from.header) {
      for_units<Group::kLanes>(lane, numel, [&](int u, int first, int count) {
        const Unit values = load_unit_of_buffer<Value>(buffer, run_at + first * kWidth, count);
        CGX_UNROLL
        for (int i = 0; i < kUnit; ++i) {
          float& sum = tile->units[u].at[i];
          sum = is_first ? values.at[i] : combine(op, sum, values.at[i]);
        }
      });
      return;
    }
    const int header_at = at + misalignment(from.header, 16);
    const Decoder decoder(__builtin_bit_cast(Header, load_field(buffer, header_at, kHeader)), bits);
    const int field_at = from.apart ? run_at : run_at + kHeader;
    for_units<Group::kLanes>(lane, numel, [&](int u, int first, int) {
      const Unit values = decoder.decode(load_field(buffer, field_at + first / kUnit * bits, bits));
      CGX_UNROLL
      for (int i = 0; i < kUnit; ++i) {
        float& sum = tile->units[u].at[i];
        sum = add(sum, values.at[i]);
      }
    });
  }
};

// ---- 3. sinks ----

// Where a bucket goes, and how.
struct Target {
  std::byte* record = nullptr;     // null: nowhere
  const Copies* copies = nullptr;  // of it
  int bits = kExactBits;
  RoundingMode rounding = RoundingMode::kNearest;
  Noise noise = {};
  uint64_t first_index = 0;     // of the bucket's first value
  std::byte* result = nullptr;  // null: nowhere
  std::byte* error = nullptr;   // null: nowhere
  float error_scale = 1.0f;
  bool failed = false;
};

CGX_LANE float lost(float value, float decoded, const Target& target) {
  if (target.failed) return float_of(kFloat32Nan);
  const float error = multiply(subtract(value, decoded), target.error_scale);
  return is_finite(error) ? error : 0.0f;
}

// Calls visit(first_place + distance) for each place that gets a record's bytes.
template <typename Visit>
CGX_LANE void for_copies(const Copies& copies, std::byte* first_place, const Visit& visit) {
  visit(first_place);
  CGX_ROLLED
  for (int i = 0; i < copies.count; ++i) visit(first_place + copies.distance[i]);
}

// One lane's unit of result and error.
template <typename Value>
CGX_LANE void store_outcome(const Target& target, int64_t first, int count, const Unit& values,
                            const Unit& decoded, std::byte* scratch) {
  constexpr int kWidth = sizeof(typename Value::Bits);
  if (target.result) store_unit<Value>(target.result + first * kWidth, decoded, count, scratch);
  if (!target.error) return;
  Unit error;
  CGX_UNROLL
  for (int i = 0; i < kUnit; ++i) error.at[i] = lost(values.at[i], decoded.at[i], target);
  store_unit<Value>(target.error + first * kWidth, error, count, scratch);
}

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

// A record, 1 to 8 bits.
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
        if (!target.result && !target.error) return;
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

// Exact values that are only moved keep their bits: visit_places(visit) calls visit(place) for each
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

// ---- 4. bodies ----

// A bucket's place in its piece.
struct Extent {
  int64_t start;  // elements
  int64_t numel;
};
CGX_LANE Extent extent_of(const Piece& piece, int64_t number) {
  const int64_t start = number * piece.bucket_size;
  return {start, at_most(piece.bucket_size, piece.numel - start)};
}

template <typename Launch>
CGX_LANE Noise noise_of(const Piece& piece, const Launch& launch) {
  const uint64_t seed =
      piece.seed_at ? segment_seed(*piece.seed_at, piece.seed_number) : piece.seed;
  return {block_seed(seed, piece.block), launch.rank, launch.phase};
}

CGX_LANE std::byte* moved(std::byte* from, int64_t bytes) { return from ? from + bytes : nullptr; }

template <typename Value, typename Group>
CGX_LANE void run_bucket(Group& group, std::byte* buffer, const Encode& launch, const Place& place,
                         const Bucket& bucket) {
  constexpr int kWidth = sizeof(typename Value::Bits);
  const Piece& piece = launch.pieces.at[bucket.piece];
  const auto [start, numel] = extent_of(piece, bucket.number);
  const std::byte* values = piece.values + start * kWidth;
  std::byte* record =
      piece.message + place.write + bucket_at(bucket.number, piece.bucket_size, piece.bits, kWidth);
  std::byte* error = moved(piece.error, start * kWidth);
  if (piece.bits == kExactBits || place.failed) {  // a failed rank's peers may be reading
    if (!place.failed)
      move_exact<Value>(group, buffer, values, numel, false,
                        [&](const auto& visit) { for_copies(launch.copies, record, visit); });
    if (!error) return;
    const Target nothing_lost{.error = error, .error_scale = 1.0f, .failed = place.failed};
    write_exact<Value>(group, buffer, nothing_lost, numel,
                       OwnValues<Value, Group>{group, buffer, values, place.failed});
    return;
  }
  const Target target{.record = record,
                      .copies = &launch.copies,
                      .bits = piece.bits,
                      .rounding = launch.rounding,
                      .noise = noise_of(piece, launch),
                      .first_index = static_cast<uint64_t>(piece.first_index + start),
                      .error = error,
                      .error_scale = 1.0f,
                      .failed = place.failed};
  write_record<Value>(group, buffer, target, numel,
                      OwnValues<Value, Group>{group, buffer, values, place.failed});
}

template <typename Value, typename Group>
CGX_LANE void run_bucket(Group& group, std::byte* buffer, const Reduce& launch, const Place& place,
                         const Bucket& bucket) {
  constexpr int kWidth = sizeof(typename Value::Bits);
  const Piece& piece = launch.pieces.at[bucket.piece];
  const auto [start, numel] = extent_of(piece, bucket.number);
  const Sums<Value, Group> sums{
      .group = group,
      .buffer = buffer,
      .own_values = piece.values + start * kWidth,
      .message = piece.message + place.read +
                 bucket_at(bucket.number, piece.bucket_size, piece.bits, kWidth),
      .stride = launch.stride,
      .size = launch.size,
      .own = launch.own,
      .bits = piece.bits,
      .op = launch.op,
      .divisor = launch.divisor,
      .failed = place.failed};
  const int64_t at = bucket_at(bucket.number, piece.bucket_size, piece.reduced_bits, kWidth);
  // A failed rank's peers may be reading.
  const Target target{.record = place.failed ? nullptr : moved(piece.reduced, place.write + at),
                      .copies = &launch.copies,
                      .bits = piece.reduced_bits,
                      .rounding = launch.rounding,
                      .noise = noise_of(piece, launch),
                      .first_index = static_cast<uint64_t>(piece.first_index + start),
                      .result = moved(piece.result, start * kWidth),
                      .error = moved(piece.error, start * kWidth),
                      .error_scale = launch.error_scale,
                      .failed = place.failed};
  if (target.record && piece.reduced_bits != kExactBits) {
    write_record<Value>(group, buffer, target, numel, sums);
  } else {
    write_exact<Value>(group, buffer, target, numel, sums);
  }
}

template <typename Value, typename Group>
CGX_LANE void run_bucket(Group& group, std::byte* buffer, const Decode& launch, const Place& place,
                         const Bucket& bucket) {
  constexpr int kWidth = sizeof(typename Value::Bits);
  const Piece& piece = launch.pieces.at[bucket.piece];
  const auto [start, numel] = extent_of(piece, bucket.number);
  const std::byte* record =
      piece.message + place.read + bucket_at(bucket.number, piece.bucket_size, piece.bits, kWidth);
  std::byte* result = piece.result + start * kWidth;
  if (piece.bits == kExactBits) {
    move_exact<Value>(group, buffer, record, numel, place.failed,
                      [&](const auto& visit) { visit(result); });
    return;
  }
  const Sums<Value, Group> one{.group = group,
                               .buffer = buffer,
                               .own_values = nullptr,
                               .message = record,
                               .stride = 0,
                               .size = 1,
                               .own = -1,
                               .bits = piece.bits,
                               .op = Op::kSum,
                               .divisor = 1.0f,
                               .failed = place.failed};
  const Target target{.result = result, .failed = place.failed};
  write_exact<Value>(group, buffer, target, numel, one);
}

}  // namespace cgx::device::cuda
