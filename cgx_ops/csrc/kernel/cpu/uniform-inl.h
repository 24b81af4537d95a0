// Bucketed min-max quantization. A bucket is read twice: once for its range, once to be encoded,
// the second time from the cache unless the bucket is larger than it. Levels pass through a tile on
// the stack, one byte each, so that arithmetic and packing are separate simple loops.
//
//   1. the range of a bucket, and the record's header
//   2. values -> levels -> field
//   3. field -> levels -> values
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernel/cpu/levels-inl.h"
#include "kernel/cpu/noise-inl.h"
#include "kernel/cpu/values-inl.h"
#include "kernel/kernels.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

struct Header {
  float min;
  float step;
};
static_assert(sizeof(Header) == 8);

constexpr int64_t field_bytes(int64_t numel, int bits) {
  return numel / 8 * bits + (numel % 8 * bits + 7) / 8;
}

[[gnu::always_inline]] inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- 1. range ----

struct Range {
  float lo;
  float step;
  float inverse;  // 0: all levels are 0
};

[[gnu::always_inline]] inline bool is_finite(float x) {
  return (__builtin_bit_cast(uint32_t, x) & 0x7f800000u) != 0x7f800000u;
}

// n > 0. The order of the stored values is that of the widened ones, so the scan widens nothing.
template <typename Value>
Range range_of(const Stored<typename Value::Bits>* __restrict values, int64_t n, int bits) {
  using Key = typename Value::Key;
  Key lowest = order_key(static_cast<Key>(values[0].value));
  Key highest = lowest;
  for (int64_t i = 0; i < n; ++i) {
    const Key key = order_key(static_cast<Key>(values[i].value));
    lowest = key < lowest ? key : lowest;
    highest = key > highest ? key : highest;
  }
  const float lo = Value::widen(static_cast<std::make_unsigned_t<Key>>(order_key(lowest)));
  const float hi = Value::widen(static_cast<std::make_unsigned_t<Key>>(order_key(highest)));
  const float extent = hi - lo;
  // Any NaN or infinity is at an end of the order.
  if (!is_finite(lo) || !is_finite(hi) || !is_finite(extent)) {
    const float nan = __builtin_bit_cast(float, kFloat32Nan);
    return {nan, nan, 0.0f};
  }
  const float step = extent / static_cast<float>((1 << bits) - 1);
  const float inverse = 1.0f / step;
  return {lo, step, step == 0.0f || !is_finite(inverse) ? 0.0f : inverse};
}

// ---- 2. encode ----

// n <= kTile. `r(i)` is what element i adds before it is rounded down.
template <typename Value, typename Addend>
[[gnu::always_inline]] inline void levels_of(const Stored<typename Value::Bits>* __restrict values,
                                             int64_t n, const Range& range, int32_t highest,
                                             const Addend& r, uint8_t* __restrict levels) {
  const float lo = range.lo;
  const float inverse = range.inverse;
  for (int64_t i = 0; i < n; ++i) {
    // Not negative, and little more than `highest`: truncation is floor and cannot overflow.
    const int32_t level =
        static_cast<int32_t>((Value::widen(values[i].value) - lo) * inverse + r(i));
    levels[i] = static_cast<uint8_t>(level < highest ? level : highest);
  }
}

template <typename Value>
void quantize_as(const std::byte* bytes, const BucketRun& run, const Rounding& rounding,
                 std::byte* records) {
  const auto* values = reinterpret_cast<const Stored<typename Value::Bits>*>(bytes);
  const int32_t highest = (1 << run.bits) - 1;
  const Pack pack = kPack[run.bits];
  Noise noise(rounding);
  alignas(64) uint8_t levels[kTile];
  for (int64_t start = 0; start < run.numel; start += run.bucket_size) {
    const int64_t n = at_most(run.bucket_size, run.numel - start);
    const Range range = range_of<Value>(values + start, n, run.bits);
    Header header{range.lo, range.step};
    float r = 0.5f;
    if (rounding.mode == RoundingMode::kShift && range.inverse != 0.0f) {
      r = *noise.at(static_cast<uint64_t>(run.first_index + start));
      header.min = range.lo + (0.5f - r) * range.step;
    }
    __builtin_memcpy(records, &header, sizeof(Header));
    std::byte* field = records + sizeof(Header);
    records = field + field_bytes(n, run.bits);
    if (range.inverse == 0.0f) {
      __builtin_memset(field, 0, static_cast<size_t>(records - field));
      continue;
    }
    for (int64_t i = 0; i < n; i += kTile) {
      const int64_t tile = at_most(kTile, n - i);
      const auto* from = values + start + i;
      if (rounding.mode != RoundingMode::kStochastic) {
        levels_of<Value>(from, tile, range, highest, [r](int64_t) { return r; }, levels);
      } else {
        for (int64_t done = 0; done < tile;) {
          const auto index = static_cast<uint64_t>(run.first_index + start + i + done);
          const float* own = noise.at(index);
          const int64_t piece = at_most(Noise::left(index), tile - done);
          levels_of<Value>(
              from + done, piece, range, highest, [own](int64_t j) { return own[j]; },
              levels + done);
          done += piece;
        }
      }
      pack(levels, static_cast<int>(tile), field + field_bytes(i, run.bits));
    }
  }
}

void quantize(Dtype dtype, const void* values, const BucketRun& run, const Rounding& rounding,
              std::byte* records) {
  with_value_type(dtype, [&](auto value) {
    quantize_as<decltype(value)>(static_cast<const std::byte*>(values), run, rounding, records);
  });
}

// ---- 3. decode ----

// Calls deliver(first, n, header, levels) for every tile of every bucket.
template <typename Deliver>
[[gnu::always_inline]] inline void for_each_tile(const std::byte* records, const BucketRun& run,
                                                 const Deliver& deliver) {
  const Unpack unpack = kUnpack[run.bits];
  alignas(64) uint8_t levels[kTile];
  for (int64_t start = 0; start < run.numel; start += run.bucket_size) {
    const int64_t n = at_most(run.bucket_size, run.numel - start);
    Header header;
    __builtin_memcpy(&header, records, sizeof(Header));
    const std::byte* field = records + sizeof(Header);
    records = field + field_bytes(n, run.bits);
    for (int64_t i = 0; i < n; i += kTile) {
      const int64_t tile = at_most(kTile, n - i);
      unpack(field + field_bytes(i, run.bits), static_cast<int>(tile), levels);
      deliver(start + i, tile, header, static_cast<const uint8_t*>(levels));
    }
  }
}

[[gnu::always_inline]] inline float decoded(const Header& header, uint8_t level) {
  return header.min + static_cast<float>(int32_t{level}) * header.step;
}

template <typename Value>
void dequantize_as(const std::byte* records, const BucketRun& run, void* out) {
  auto* values = static_cast<Stored<typename Value::Bits>*>(out);
  for_each_tile(
      records, run,
      [values](int64_t first, int64_t n, Header header, const uint8_t* __restrict levels) {
        auto* __restrict to = values + first;
        for (int64_t i = 0; i < n; ++i) to[i].value = Value::round(decoded(header, levels[i]));
      });
}

void dequantize(const std::byte* records, const BucketRun& run, Dtype dtype, void* values) {
  with_value_type(dtype, [&](auto value) { dequantize_as<decltype(value)>(records, run, values); });
}

void dequantize_add(const std::byte* records, const BucketRun& run, float* sum) {
  for_each_tile(records, run,
                [sum](int64_t first, int64_t n, Header header, const uint8_t* __restrict levels) {
                  auto* __restrict to = reinterpret_cast<Stored<float>*>(sum) + first;
                  for (int64_t i = 0; i < n; ++i) {
                    to[i].value = with_one_nan(to[i].value + decoded(header, levels[i]));
                  }
                });
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
