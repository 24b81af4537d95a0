// Bucketed min-max quantization. A bucket is read twice: once for its range, once to be encoded,
// the second time from the cache unless the bucket is larger than it. From a value to its place in
// the field, and back, everything stays in registers, sixteen values at a time.
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
constexpr Header kNonFinite = {__builtin_bit_cast(float, kFloat32Nan),
                               __builtin_bit_cast(float, kFloat32Nan)};

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
  if (!is_finite(lo) || !is_finite(hi) || !is_finite(extent))
    return {kNonFinite.min, kNonFinite.step, 0.0f};
  const float step = extent / static_cast<float>((1 << bits) - 1);
  const float inverse = 1.0f / step;
  return {lo, step, step == 0.0f || !is_finite(inverse) ? 0.0f : inverse};
}

// ---- 2. encode ----

// Sixteen values -> levels. `r` is what is added before rounding down.
[[gnu::always_inline]] inline Ints16 levels_of(const Floats16& values, const Range& range,
                                               int32_t highest, const Floats16& r) {
  const Ints top = Ints{} + highest;
  Ints16 levels;
#pragma GCC unroll 4
  for (int i = 0; i < kRegisters; ++i) {
    // Not negative, and little more than `highest`: truncation is floor and cannot overflow.
    const Ints level =
        __builtin_convertvector((values.at[i] - range.lo) * range.inverse + r.at[i], Ints);
    levels.at[i] = level < top ? level : top;
  }
  return levels;
}

// One bucket's field. noise(i) gives r of elements [i, i + 16), of which keep(i, n, values,
// levels) may keep what they lose; n < 16 at the bucket's end.
template <typename Value, int kBits, typename R, typename Keep>
[[gnu::always_inline]] inline void encode_field(
    const Stored<typename Value::Bits>* __restrict values, int64_t n, const Range& range,
    std::byte* __restrict field, const R& noise, const Keep& keep) {
  constexpr int32_t kHighest = (1 << kBits) - 1;
  int64_t i = 0;
  for (; i + kSixteen <= n; i += kSixteen, field += 2 * kBits) {
    const auto some = load16<Value>(values + i);
    const Ints16 levels = levels_of(some, range, kHighest, noise(i));
    pack16<kBits>(levels, field);
    keep(i, kSixteen, some, levels);
  }
  if (i == n) return;
  const auto some = load_last<Value>(values + i, static_cast<int>(n - i), range.lo);  // has level 0
  const Ints16 levels = levels_of(some, range, kHighest, noise(i));
  std::byte packed[2 * kBits];
  pack16<kBits>(levels, packed);
  __builtin_memcpy(field, packed, static_cast<size_t>(field_bytes(n - i, kBits)));
  keep(i, static_cast<int>(n - i), some, levels);
}

// A bucket's record. keep(header, i, n, values, levels) sees sixteen values at a time, as in
// encode_field. Returns where the next record begins.
template <typename Value, int kBits, typename Keep>
[[gnu::always_inline]] inline std::byte* encode_bucket(
    const Stored<typename Value::Bits>* __restrict values, int64_t n, uint64_t index,
    const Range& range, RoundingMode mode, Noise* noise, std::byte* record, const Keep& keep) {
  Header header{range.lo, range.step};
  bool flat = range.inverse == 0.0f;  // all levels are 0
  float r = 0.5f;
  if (mode == RoundingMode::kShift && !flat) {
    r = noise->at(index).at[0][0];
    header.min = range.lo + (0.5f - r) * range.step;
    if (!is_finite(header.min)) {
      header = kNonFinite;
      flat = true;
    }
  }
  __builtin_memcpy(record, &header, sizeof(Header));
  std::byte* field = record + sizeof(Header);
  std::byte* end = field + field_bytes(n, kBits);
  const auto keep_here = [&](int64_t i, int count, const Floats16& some, const Ints16& levels) {
    keep(header, i, count, some, levels);
  };
  if (flat) {
    __builtin_memset(field, 0, static_cast<size_t>(end - field));
    for (int64_t i = 0; i < n; i += kSixteen) {
      const auto count = static_cast<int>(at_most(kSixteen, n - i));
      keep_here(i, count, load_last<Value>(values + i, count, 0.0f), Ints16{});
    }
  } else if (mode == RoundingMode::kStochastic) {
    const auto each = [&](int64_t i) { return noise->at(index + static_cast<uint64_t>(i)); };
    encode_field<Value, kBits>(values, n, range, field, each, keep_here);
  } else {
    Floats16 same;
    for (auto& lanes : same.at) lanes = Floats{} + r;
    const auto each = [&](int64_t) { return same; };
    encode_field<Value, kBits>(values, n, range, field, each, keep_here);
  }
  return end;
}

constexpr int64_t kMostRanges = 8;
constexpr int64_t kScanAhead = 4096;  // values: they stay in the first-level cache

// keep(header, first, n, values, levels) sees n <= 16 values at a time, from element `first` on.
template <typename Value, int kBits, typename Keep>
[[gnu::always_inline]] inline void quantize_as(const void* from, const BucketRun& run,
                                               const Rounding& rounding, std::byte* records,
                                               const Keep& keep) {
  const auto* values = static_cast<const Stored<typename Value::Bits>*>(from);
  Noise noise(rounding);
  // The ends of a few buckets' scans, and their divisions, overlap if they follow each other.
  Range ranges[kMostRanges];
  const int64_t most = at_most(kMostRanges, 1 + kScanAhead / run.bucket_size);
  for (int64_t start = 0; start < run.numel;) {
    int64_t scanned = 0;
    for (int64_t from = start; scanned < most && from < run.numel; from += run.bucket_size)
      ranges[scanned++] =
          range_of<Value>(values + from, at_most(run.bucket_size, run.numel - from), kBits);
    for (int64_t i = 0; i < scanned; ++i, start += run.bucket_size) {
      const int64_t n = at_most(run.bucket_size, run.numel - start);
      const auto index = static_cast<uint64_t>(run.first_index + start);
      records = encode_bucket<Value, kBits>(
          values + start, n, index, ranges[i], rounding.mode, &noise, records,
          [&](const Header& header, int64_t at, int count, const Floats16& some,
              const Ints16& levels) { keep(header, start + at, count, some, levels); });
    }
  }
}

// Calls visit(std::integral_constant<int, bits>{}).
template <typename Visit>
[[gnu::always_inline]] inline void with_bits(int bits, const Visit& visit) {
  switch (bits) {
    case 1:
      return visit(std::integral_constant<int, 1>{});
    case 2:
      return visit(std::integral_constant<int, 2>{});
    case 3:
      return visit(std::integral_constant<int, 3>{});
    case 4:
      return visit(std::integral_constant<int, 4>{});
    case 5:
      return visit(std::integral_constant<int, 5>{});
    case 6:
      return visit(std::integral_constant<int, 6>{});
    case 7:
      return visit(std::integral_constant<int, 7>{});
    case 8:
      return visit(std::integral_constant<int, 8>{});
  }
}

void quantize(Dtype dtype, const void* values, const BucketRun& run, const Rounding& rounding,
              std::byte* records) {
  with_value_type(dtype, [&](auto value) {
    with_bits(run.bits, [&](auto bits) {
      quantize_as<decltype(value), bits()>(values, run, rounding, records, [](auto...) {});
    });
  });
}

[[gnu::always_inline]] inline Floats decode_levels(const Header& header, Ints levels) {
  return header.min + __builtin_convertvector(levels, Floats) * header.step;
}

void quantize_keeping(const float* values, const BucketRun& run, const Rounding& rounding,
                      std::byte* records, float* lost) {
  with_bits(run.bits, [&](auto bits) {
    quantize_as<Float32, bits()>(
        values, run, rounding, records,
        [lost](const Header& header, int64_t first, int n, const Floats16& some,
               const Ints16& levels) {
          Floats16 errors;
#pragma GCC unroll 4
          for (int i = 0; i < kRegisters; ++i)
            errors.at[i] = finite_or_zero(some.at[i] - decode_levels(header, levels.at[i]));
          store_some<Float32>(errors, n, reinterpret_cast<Stored<uint32_t>*>(lost) + first);
        });
  });
}

// ---- 3. decode ----

// Calls deliver(first, n, decoded) for every sixteen values of every bucket; the last may be fewer.
template <int kBits, typename Deliver>
[[gnu::always_inline]] inline void decode_records(const std::byte* __restrict records,
                                                  const BucketRun& run, const Deliver& deliver) {
  for (int64_t start = 0; start < run.numel; start += run.bucket_size) {
    const int64_t n = at_most(run.bucket_size, run.numel - start);
    Header header;
    __builtin_memcpy(&header, records, sizeof(Header));
    // No rank writes another one that is not finite; of two NaNs it would depend on the compiler
    // which is kept.
    if (!is_finite(header.min) || !is_finite(header.step)) header = kNonFinite;
    const auto decoded = [&header](Ints levels) { return decode_levels(header, levels); };
    const std::byte* field = records + sizeof(Header);
    records = field + field_bytes(n, kBits);
    int64_t i = 0;
    for (; i + kSixteen <= n; i += kSixteen, field += 2 * kBits)
      deliver(start + i, kSixteen, map<Floats16>(unpack16<kBits>(field), decoded));
    if (i == n) continue;
    std::byte packed[2 * kBits] = {};
    __builtin_memcpy(packed, field, static_cast<size_t>(records - field));
    deliver(start + i, static_cast<int>(n - i), map<Floats16>(unpack16<kBits>(packed), decoded));
  }
}

template <typename Value, int kBits>
void dequantize_as(const std::byte* records, const BucketRun& run, void* out) {
  auto* values = static_cast<Stored<typename Value::Bits>*>(out);
  decode_records<kBits>(records, run, [values](int64_t first, int n, const Floats16& decoded) {
    store_some<Value>(decoded, n, values + first);
  });
}

void dequantize(const std::byte* records, const BucketRun& run, Dtype dtype, void* values) {
  with_value_type(dtype, [&](auto value) {
    with_bits(run.bits,
              [&](auto bits) { dequantize_as<decltype(value), bits()>(records, run, values); });
  });
}

template <int kBits>
void dequantize_add_as(const std::byte* records, const BucketRun& run, const float* base,
                       float* sum) {
  decode_records<kBits>(records, run, [base, sum](int64_t first, int n, const Floats16& decoded) {
    if (n == kSixteen) {
      auto total = load_registers<Floats16>(base + first);
      for (int i = 0; i < kRegisters; ++i) {
        const Floats added = total.at[i] + decoded.at[i];
        total.at[i] = added != added ? Floats{} + __builtin_bit_cast(float, kFloat32Nan) : added;
      }
      store_registers(total, sum + first);
    } else {
      alignas(64) float last[kSixteen];
      store_registers(decoded, last);
      const auto* from = reinterpret_cast<const Stored<float>*>(base) + first;
      auto* to = reinterpret_cast<Stored<float>*>(sum) + first;
      for (int i = 0; i < n; ++i) to[i].value = with_one_nan(from[i].value + last[i]);
    }
  });
}

void dequantize_add(const std::byte* records, const BucketRun& run, const float* base, float* sum) {
  with_bits(run.bits, [&](auto bits) { dequantize_add_as<bits()>(records, run, base, sum); });
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
