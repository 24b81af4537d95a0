// Sources of a bucket's values: this rank's own values, or the sum of all ranks, tile by tile.
// Residuals are added to own values first, in fp32.
//
// source(tile, start, numel) fills a tile with fp32 values of a bucket from `start` on. An
// incomplete last unit repeats its first value.
#pragma once

#include <cstdint>

#include "kernel/cuda/blocks.h"
#include "kernel/cuda/formats.h"
#include "kernel/cuda/memory.h"
#include "kernel/cuda/rotate.h"
#include "kernel/cuda/sparse.h"
#include "kernel/cuda/tile.h"
#include "kernel/cuda/trits.h"

namespace cgx::device::cuda {

// Adds a residual to a lane's unit of `count` own values, which begin at offset `at`.
template <typename Value>
CGX_LANE void add_residual(const std::byte* residual, int at, int count, Unit* values) {
  constexpr int kWidth = sizeof(typename Value::Bits);
  const std::byte* from = residual + at * kWidth;
  if (misalignment(residual, 16) == 0 && count == kUnit) {
    const Unit unit = load_unit<Value>(from);
    CGX_UNROLL
    for (int i = 0; i < kUnit; ++i) values->at[i] = with_one_nan(add(values->at[i], unit.at[i]));
    return;
  }
  // One by one. Registers cannot be indexed by a variable, so values are rotated through the first
  // register.
  CGX_ROLLED
  for (int i = 0; i < kUnit; ++i) {
    const float old_error = load_value<Value>(from + (i < count ? i : 0) * kWidth);
    const float sum = with_one_nan(add(values->at[0], old_error));
    CGX_UNROLL
    for (int j = 1; j < kUnit; ++j) values->at[j - 1] = values->at[j];
    values->at[kUnit - 1] = sum;
  }
}

template <typename Value, typename Group>
struct OwnValues {
  static constexpr int kWidth = sizeof(typename Value::Bits);

  Group& group;
  std::byte* buffer;
  const std::byte* values;    // of the bucket
  const std::byte* residual;  // of the bucket; null: none
  bool failed;

  CGX_LANE void operator()(typename Group::template Lanes<Tile>& tile, int64_t start,
                           int numel) const {
    if (failed) return fill_with_nan(group, tile);
    read_values(tile, values + start * kWidth, numel);
    if (!residual) return;
    const std::byte* from = residual + start * kWidth;
    group.each([&](int lane) {
      for_units<Group::kLanes>(lane, numel, [&](int u, int at, int count) {
        add_residual<Value>(from, at, count, &tile[lane].units[u]);
      });
    });
  }

 private:
  CGX_LANE void read_values(typename Group::template Lanes<Tile>& tile, const std::byte* from,
                            int numel) const {
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

// The sum of all ranks, in rank order. Copies as many messages at a time to the buffer as fit.
template <typename Value, typename Format, typename Group>
struct SumOfRanks {
  static constexpr int kWidth = sizeof(typename Value::Bits);
  static constexpr bool kBlocks = Format::kFormats == Formats::kBlocks;

  Group& group;
  std::byte* buffer;
  const std::byte* own_values;    // of the bucket
  const std::byte* own_residual;  // of the bucket; null: none
  const std::byte* message;       // of rank 0, beginning with the bucket
  int64_t stride;
  int64_t bucket_numel;
  int size, own;
  Coding coding;
  Draw indices;
  float own_vote;  // the magnitude of own votes: 1, or NaN if a value is not finite
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
      // Rotated and sparse records are copied one at a time, and decoded at the start of the
      // buffer.
      const bool is_whole = coding.rotation_log != 0 || is_sparse(coding);
      const bool alone = is_whole && first != own;
      const int begin = alone ? 4 * Layout<Group>::kTile : 0;
      group.each([&](int lane) {
        int at = begin;
        CGX_ROLLED
        for (last = first; last < size; ++last) {
          const Arrival from = arrival(last, start, numel);
          if (at + from.in_buffer > Layout<Group>::kArriving) break;
          if (is_whole && last != first) break;
          if (from.apart)
            start_copy_in<Group::kLanes>(lane, buffer + at, from.header, from.header_bytes);
          start_copy_in<Group::kLanes>(lane, buffer + at + from.apart, from.run, from.bytes);
          at += from.in_buffer;
        }
        finish_copies();
      });
      if (alone) {
        expand(arrival(first, start, numel), begin, numel);
        group.each([&](int lane) {
          for_units<Group::kLanes>(lane, numel, [&](int u, int at, int count) {
            add_to(&tile[lane].units[u], load_unit_of_buffer<Float32>(buffer, 4 * at, count));
          });
        });
        continue;
      }
      group.each([&](int lane) {
        int at = 0;
        CGX_ROLLED
        for (int rank = first; rank < last; ++rank) {
          const Arrival from = arrival(rank, start, numel);
          add_arrival(from, at, rank, start, lane, numel, &tile[lane]);
          at += from.in_buffer;
        }
      });
    }
    // It is sufficient to normalize NaN once, at the end.
    const bool moved = own == 0 || is_exact(coding) || Format::in_halves(coding);
    const bool only_moved = size == 1 && moved && !is_vote(coding) && op != Op::kAvg;
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
  // A rank's part of a tile, in global memory and in the buffer.
  struct Arrival {
    const std::byte* header;  // of the record; null: values
    const std::byte* run;
    int bytes;
    int header_bytes;  // of a header that is separate from the run; else 0
    int apart;         // bytes of the separate header in the buffer
    int in_buffer;     // total bytes
  };

  CGX_LANE bool has_values(int rank) const {
    return rank == own || is_exact(coding) || Format::in_halves(coding);
  }

  CGX_LANE Arrival arrival(int rank, int64_t start, int numel) const {
    const std::byte* record = message + rank * stride;
    if (has_values(rank)) {
      const int width = rank != own && Format::in_halves(coding) ? 2 : kWidth;
      const std::byte* run = (rank == own ? own_values : record) + start * width;
      return {nullptr, run, numel * width, 0, 0, bytes_in_buffer(run, numel * width)};
    }
    if (is_sparse(coding)) {
      const int bytes = SparseRecord(bucket_numel, coding, kWidth).bytes();
      return {record, record, bytes, 0, 0, bytes_in_buffer(record, bytes)};
    }
    const auto header = static_cast<int>(header_bytes(coding));
    const int64_t first = field_at(start), last = field_end(start + numel);
    const auto field = static_cast<int>(last - first);
    if (start == 0)
      return {record, record, header + field, 0, 0, bytes_in_buffer(record, header + field)};
    const std::byte* run = record + header + first;
    const int apart = bytes_in_buffer(record, header);
    return {record, run, field, header, apart, apart + bytes_in_buffer(run, field)};
  }

  // The offset of an element's codes in a bucket's field. Groups of trits are read as a whole.
  CGX_LANE int64_t field_at(int64_t element) const {
    if constexpr (kBlocks) return field_bytes(element, coding);
    if (coding.format == BucketFormat::kTernary) return trit_group_at(element);
    return element / kUnit * coding.bits;
  }
  CGX_LANE int64_t field_end(int64_t element) const {
    if (!kBlocks && coding.format == BucketFormat::kTernary)
      element = at_most(bucket_numel, (element + kTrits - 1) / kTrits * kTrits);
    return field_bytes(element, coding);
  }

  // Loads and decodes unit `first` of the tile that begins at `start`, from a record at offset `at`
  // of the buffer.
  CGX_LANE Unit decode_unit(const typename Format::Decoder& decoder, const Arrival& from, int at,
                            int64_t start, int first, int count) const {
    const auto header = static_cast<int>(header_bytes(coding));
    const int field = at + from.apart + misalignment(from.run, 16) + (from.apart ? 0 : header);
    if constexpr (kBlocks) {
      const UnitInField unit = unit_in_field(first, coding);
      const float scale = decoder.scale_of_byte(load<uint8_t>(buffer + field + unit.scale));
      return decoder.decode(load_field(buffer, field + unit.codes, coding.bits), scale);
    } else {
      if (coding.format == BucketFormat::kTernary)
        return decoder.decode(
            load_trits(buffer, field, trit_group_at(start), start + first, bucket_numel, count));
      return decoder.decode(load_field(buffer, field + first / kUnit * coding.bits, coding.bits));
    }
  }

  CGX_LANE typename Format::Decoder decoder_of(const Arrival& from, int at) const {
    const auto bytes = static_cast<int>(header_bytes(coding));
    const uint64_t word = load_field(buffer, at + misalignment(from.header, 16), bytes);
    return {header_of_word(word, coding), coding};
  }

  CGX_LANE void add_arrival(const Arrival& from, int at, int rank, int64_t start, int lane,
                            int numel, Tile* tile) const {
    if (from.header) {
      const auto decoder = decoder_of(from, at);
      for_units<Group::kLanes>(lane, numel, [&](int u, int first, int count) {
        add_to(&tile->units[u], decode_unit(decoder, from, at, start, first, count));
      });
      return;
    }
    const int run_at = at + misalignment(from.run, 16);
    const std::byte* residual =
        rank == own && own_residual ? own_residual + start * kWidth : nullptr;
    const bool half = rank != own && Format::in_halves(coding);
    for_units<Group::kLanes>(lane, numel, [&](int u, int first, int count) {
      Unit values = half ? load_unit_of_buffer<HalfOf<Value>>(buffer, run_at + first * 2, count)
                         : load_unit_of_buffer<Value>(buffer, run_at + first * kWidth, count);
      if (residual) add_residual<Value>(residual, first, count, &values);
      CGX_UNROLL
      for (int i = 0; i < kUnit; ++i) {
        float& sum = tile->units[u].at[i];
        if (is_vote(coding)) values.at[i] = values.at[i] < 0.0f ? -own_vote : own_vote;
        sum = rank == 0 ? values.at[i] : combine(op, sum, values.at[i]);
      }
    });
  }

  // Decodes a record at offset `at` of the buffer to values.
  CGX_LANE void expand(const Arrival& from, int at, int numel) const {
    if constexpr (Format::kFormats == Formats::kSparse) {
      const int record = at + misalignment(from.run, 16);
      expand_sparse<Value>(group, buffer, record, coding, numel, indices);
    } else {
      group.each([&](int lane) {
        const auto decoder = decoder_of(from, at);
        for_units<Group::kLanes>(lane, numel, [&](int, int first, int count) {
          store_floats(buffer + 4 * first, decode_unit(decoder, from, at, 0, first, count));
        });
      });
      rotate</*kBack=*/true>(group, buffer, numel, coding.rotation_log);
    }
  }

  CGX_LANE static void add_to(Unit* sums, const Unit& values) {
    CGX_UNROLL
    for (int i = 0; i < kUnit; ++i) sums->at[i] = add(sums->at[i], values.at[i]);
  }
};

}  // namespace cgx::device::cuda
