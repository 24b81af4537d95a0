// Where a bucket's values come from: this rank's own, or sums of all ranks, a tile at a time. To
// own values their residual, if there is one, is added first, in fp32.
//
// source(tile, start, numel) fills a tile with fp32 values of a bucket from `start` on. In a last
// unit that is not whole its first value is repeated.
#pragma once

#include <cstdint>

#include "kernel/cuda/codec.h"
#include "kernel/cuda/memory.h"
#include "kernel/cuda/tile.h"

namespace cgx::device::cuda {

// Adds a residual to one lane's unit of `count` own values, `at` of those whose residual begins at
// `residual`.
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
  // One by one. Registers cannot be indexed by a variable: values take turns to be the first.
  CGX_ROLLED
  for (int i = 0; i < kUnit; ++i) {
    const float lost = load_value<Value>(from + (i < count ? i : 0) * kWidth);
    const float sum = with_one_nan(add(values->at[0], lost));
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

// Of all ranks, in their order. Messages arrive in the buffer, as many at once as it holds.
template <typename Value, typename Group>
struct Sums {
  static constexpr int kWidth = sizeof(typename Value::Bits);

  Group& group;
  std::byte* buffer;
  const std::byte* own_values;    // of the bucket
  const std::byte* own_residual;  // of the bucket; null: none
  const std::byte* message;       // of rank 0, from the bucket on
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
          const std::byte* residual =
              rank == own && own_residual ? own_residual + start * kWidth : nullptr;
          add_arrival(from, at, residual, rank == 0, lane, numel, &tile[lane]);
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

  CGX_LANE void add_arrival(const Arrival& from, int at, const std::byte* residual, bool is_first,
                            int lane, int numel, Tile* tile) const {
    const int run_at = at + from.apart + misalignment(from.run, 16);
    if (!from.header) {
      for_units<Group::kLanes>(lane, numel, [&](int u, int first, int count) {
        Unit values = load_unit_of_buffer<Value>(buffer, run_at + first * kWidth, count);
        if (residual) add_residual<Value>(residual, first, count, &values);
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

}  // namespace cgx::device::cuda
