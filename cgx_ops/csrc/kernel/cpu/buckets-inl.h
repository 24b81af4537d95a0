// Encodes buckets of values to records (a header and a field of codes) and decodes them. A bucket
// is read more than once, but from the cache unless it is larger. Between memory accesses
// everything stays in registers, sixteen values at a time.
//
//   1. the interface of a format
//   2. values -> codes -> field
//   3. field -> codes -> values
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernel/cpu/blocks-inl.h"
#include "kernel/cpu/fields-inl.h"
#include "kernel/cpu/levels-inl.h"
#include "kernel/cpu/magnitudes-inl.h"
#include "kernel/cpu/mx-inl.h"
#include "kernel/cpu/noise-inl.h"
#include "kernel/cpu/nvfp4-inl.h"
#include "kernel/cpu/onebit-inl.h"
#include "kernel/cpu/qsgd-inl.h"
#include "kernel/cpu/ternary-inl.h"
#include "kernel/cpu/uniform-inl.h"
#include "kernel/cpu/values-inl.h"
#include "kernel/kernels.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

// ---- 1. formats ----
//
// A format F is a stateless struct with these members:
//
//   Field                       how codes are packed: fields-inl.h
//   Wire, Header                the header as bytes and as numbers; read(Wire), write(Header)
//   Grid                        the properties of a bucket that encoding needs
//   scan<Value>(values, n, run) -> Grid, for n > 0 values
//   header(grid)                -> Header
//   flat(grid)                  whether all codes are kFlat
//   codes(values, grid, r)      -> codes of sixteen values; r is their noise, or 0.5
//   values(header, codes)       -> decoded values
//   kMoves                      whether shift rounding moves its grid: move(grid, r, &header)
//
// Block formats have the interface in blocks-inl.h.

// Calls visit(format) with the format of a run.
template <typename Visit>
[[gnu::always_inline]] inline void with_format(const BucketRun& run, const Visit& visit) {
  switch (run.format) {
    case BucketFormat::kUniform:
      return with_bits<1, 8>(run.bits, [&](auto bits) { visit(Uniform<bits()>{}); });
    case BucketFormat::kLevels:
      return with_bits<1, 4>(run.bits, [&](auto bits) { visit(Levels<bits()>{}); });
    case BucketFormat::kSign:
      return visit(Sign{});
    case BucketFormat::kOnebit:
      return visit(Onebit{});
    case BucketFormat::kTernary:
      return visit(Ternary{});
    case BucketFormat::kQsgd:
      return with_bits<2, 8>(run.bits, [&](auto bits) { visit(Qsgd<bits()>{}); });
    case BucketFormat::kMagnitudes:
      return with_bits<2, 8>(run.bits, [&](auto bits) { visit(Magnitudes<bits()>{}); });
    case BucketFormat::kMxfp8:
      return visit(Mx<BucketFormat::kMxfp8>{});
    case BucketFormat::kMxfp8E5m2:
      return visit(Mx<BucketFormat::kMxfp8E5m2>{});
    case BucketFormat::kMxfp4:
      return visit(Mx<BucketFormat::kMxfp4>{});
    case BucketFormat::kNvfp4:
      return visit(Nvfp4{});
  }
}

// ---- 2. encode ----

// In values. Buckets are scanned a few at a time, at most this many values unless one bucket has
// more. During encoding, as many of the following values are prefetched to the L2 cache.
constexpr int64_t kAhead = 2048;
constexpr int kSecondLevel = 2;  // for __builtin_prefetch

// Encodes the field of one bucket. codes_of(i, values) returns the codes of elements [i, i + 16).
// keep(i, n, values, codes) may store their errors; n < 16 at the end of the bucket.
template <typename Value, typename Format, typename CodesOf, typename Keep>
[[gnu::always_inline]] inline void encode_field(const Stored<typename Value::Bits>* values,
                                                int64_t n, float fill, std::byte* __restrict field,
                                                std::byte* end, const CodesOf& codes_of,
                                                const Keep& keep) {
  using Field = typename Format::Field;
  constexpr int64_t kGroup = Field::kSteps * kSixteen;
  constexpr int kStepsOfLine = 64 / (kSixteen * sizeof(*values));
  int64_t first = 0;
  for (; first + kGroup <= n; first += kGroup, field += Field::kGroupBytes) {
    Ints16 codes[Field::kSteps];
    for (int step = 0; step < Field::kSteps; ++step) {
      const int64_t i = first + step * kSixteen;
      if (step % kStepsOfLine == 0) __builtin_prefetch(values + i + kAhead, 0, kSecondLevel);
      const auto some = load16<Value>(values + i);
      codes[step] = codes_of(i, some);
      keep(i, kSixteen, some, codes[step]);
    }
    Field::pack(codes, field);
  }
  if (first == n) return;
  Ints16 codes[Field::kSteps];
  for (int step = 0; step < Field::kSteps; ++step) {
    const int64_t i = first + step * kSixteen;
    if (i >= n) {
      codes[step] = same_code(0);
      continue;
    }
    const auto count = static_cast<int>(at_most(kSixteen, n - i));
    const auto some = load_last<Value>(values + i, count, fill);
    codes[step] = codes_of(i, some);
    keep(i, count, some, codes[step]);
  }
  Field::pack_last(codes, end - field, n - first, field);
}

// Encodes the record of a bucket. keep(header, i, n, values, codes) is called for sixteen values at
// a time, as in encode_field. Returns the address of the next record.
template <typename Value, typename Format, typename Keep>
[[gnu::always_inline]] inline std::byte* encode_bucket(const Stored<typename Value::Bits>* values,
                                                       int64_t n, uint64_t index,
                                                       const typename Format::Grid& grid,
                                                       const BucketRun& run, RoundingMode mode,
                                                       Noise* noise, std::byte* record,
                                                       const Keep& keep) {
  typename Format::Header header = Format::header(grid);
  bool flat = Format::flat(grid);
  float r = 0.5f;
  if constexpr (Format::kMoves) {
    if (mode == RoundingMode::kShift && !flat) {
      r = noise->of(index);
      flat = !Format::move(grid, r, &header);
    }
  }
  const typename Format::Wire wire = Format::write(header);
  __builtin_memcpy(record, &wire, sizeof(wire));
  std::byte* field = record + sizeof(wire);
  std::byte* end = field + field_bytes(run.format, n, run.bits);
  const auto keep_here = [&](int64_t i, int count, const Floats16& some, const Ints16& codes) {
    keep(header, i, count, some, codes);
  };
  // Padding values at the end of a bucket get code 0 in a bit field.
  const float fill = Format::fill(grid);
  if (flat) {
    const Ints16 same = same_code(Format::kFlat);
    const auto each = [&](int64_t, const Floats16&) { return same; };
    encode_field<Value, Format>(values, n, fill, field, end, each, keep_here);
  } else if (mode == RoundingMode::kStochastic) {
    const auto each = [&](int64_t i, const Floats16& some) {
      return Format::codes(some, grid, noise->at(index + static_cast<uint64_t>(i)));
    };
    encode_field<Value, Format>(values, n, fill, field, end, each, keep_here);
  } else {
    Floats16 same;
    for (auto& lanes : same.at) lanes = Floats{} + r;
    const auto each = [&](int64_t, const Floats16& some) {
      return Format::codes(some, grid, same);
    };
    encode_field<Value, Format>(values, n, fill, field, end, each, keep_here);
  }
  return end;
}

constexpr int64_t kMostScans = 8;

// keep(header, first, n, values, codes) is called for n <= 16 values at a time, from element
// `first` on.
template <typename Value, typename Format, typename Keep>
[[gnu::always_inline]] inline void quantize_as(const void* from, const BucketRun& run,
                                               const Rounding& rounding, std::byte* records,
                                               const Keep& keep) {
  const auto* values = static_cast<const Stored<typename Value::Bits>*>(from);
  Noise noise(rounding);
  // Scanning a few buckets in a row lets the ends of their scans, and their divisions, overlap.
  typename Format::Grid grids[kMostScans];
  const int64_t most = run.bucket_size < kAhead ? at_most(kMostScans, kAhead / run.bucket_size) : 1;
  for (int64_t start = 0; start < run.numel;) {
    int64_t scanned = 0;
    for (int64_t from = start; scanned < most && from < run.numel; from += run.bucket_size)
      grids[scanned++] = Format::template scan<Value>(
          values + from, at_most(run.bucket_size, run.numel - from), run);
    for (int64_t i = 0; i < scanned; ++i, start += run.bucket_size) {
      const int64_t n = at_most(run.bucket_size, run.numel - start);
      const auto index = static_cast<uint64_t>(run.first_index + start);
      records = encode_bucket<Value, Format>(
          values + start, n, index, grids[i], run, rounding.mode, &noise, records,
          [&](const auto& header, int64_t at, int count, const Floats16& some,
              const Ints16& codes) { keep(header, start + at, count, some, codes); });
    }
  }
}

// `errors`: null, or where to write the quantization errors; may be `values`.
template <typename Format>
void quantize_floats(const float* values, const BucketRun& run, const Rounding& rounding,
                     std::byte* records, float* errors) {
  quantize_as<Float32, Format>(
      values, run, rounding, records,
      [errors](const auto& header, int64_t first, int n, const Floats16& some,
               const Ints16& codes) {
        if (!errors) return;
        Floats16 differences;
#pragma GCC unroll 4
        for (int i = 0; i < kRegisters; ++i)
          differences.at[i] = finite_or_zero(some.at[i] - Format::values(header, codes.at[i]));
        store_some<Float32>(differences, n, reinterpret_cast<Stored<uint32_t>*>(errors) + first);
      });
}

void quantize_keeping(const float* values, const BucketRun& run, const Rounding& rounding,
                      std::byte* records, float* errors) {
  with_format(run, [&](auto format) {
    quantize_floats<decltype(format)>(values, run, rounding, records, errors);
  });
}

void quantize(Dtype dtype, const void* values, const BucketRun& run, const Rounding& rounding,
              std::byte* records) {
  if (run.format != BucketFormat::kUniform)
    return quantize_keeping(static_cast<const float*>(values), run, rounding, records, nullptr);
  with_value_type(dtype, [&](auto value) {
    with_bits<1, 8>(run.bits, [&](auto bits) {
      quantize_as<decltype(value), Uniform<bits()>>(values, run, rounding, records,
                                                    [](auto&&...) {});
    });
  });
}

// ---- 3. decode ----

// Calls deliver(first, n, decoded) for every sixteen values of every bucket; the last may be fewer.
template <typename Format, typename Deliver>
[[gnu::always_inline]] inline void decode_records(const std::byte* __restrict records,
                                                  const BucketRun& run, const Deliver& deliver) {
  using Field = typename Format::Field;
  constexpr int64_t kGroup = Field::kSteps * kSixteen;
  for (int64_t start = 0; start < run.numel; start += run.bucket_size) {
    const int64_t n = at_most(run.bucket_size, run.numel - start);
    typename Format::Wire wire;
    __builtin_memcpy(&wire, records, sizeof(wire));
    const typename Format::Header header = Format::read(wire);
    const auto decoded = [&header](Ints codes) { return Format::values(header, codes); };
    const std::byte* field = records + sizeof(wire);
    records = field + field_bytes(run.format, n, run.bits);
    Ints16 codes[Field::kSteps];
    int64_t first = 0;
    for (; first + kGroup <= n; first += kGroup, field += Field::kGroupBytes) {
      Field::unpack(field, codes);
      for (int step = 0; step < Field::kSteps; ++step)
        deliver(start + first + step * kSixteen, kSixteen, map<Floats16>(codes[step], decoded));
    }
    if (first == n) continue;
    Field::unpack_last(field, records - field, n - first, codes);
    for (int step = 0; step < Field::kSteps && first < n; ++step, first += kSixteen)
      deliver(start + first, static_cast<int>(at_most(kSixteen, n - first)),
              map<Floats16>(codes[step], decoded));
  }
}

template <typename Value, typename Format>
void dequantize_as(const std::byte* records, const BucketRun& run, void* out) {
  auto* values = static_cast<Stored<typename Value::Bits>*>(out);
  decode_records<Format>(records, run, [values](int64_t first, int n, const Floats16& decoded) {
    store_some<Value>(decoded, n, values + first);
  });
}

void dequantize(const std::byte* records, const BucketRun& run, Dtype dtype, void* values) {
  if (run.format != BucketFormat::kUniform)
    return with_format(
        run, [&](auto format) { dequantize_as<Float32, decltype(format)>(records, run, values); });
  with_value_type(dtype, [&](auto value) {
    with_bits<1, 8>(run.bits, [&](auto bits) {
      dequantize_as<decltype(value), Uniform<bits()>>(records, run, values);
    });
  });
}

template <typename Format>
void dequantize_add_as(const std::byte* records, const BucketRun& run, const float* base,
                       float* sum) {
  decode_records<Format>(records, run, [base, sum](int64_t first, int n, const Floats16& decoded) {
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
  with_format(run,
              [&](auto format) { dequantize_add_as<decltype(format)>(records, run, base, sum); });
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
