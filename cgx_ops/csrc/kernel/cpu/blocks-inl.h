// Encodes and decodes buckets whose fields are blocks: a scale of one byte, then the codes of 16 or
// 32 values. A block stays in registers.
//
// A block format is a BlockFormat with these members:
//
//   Header                            what all blocks of a bucket share: write(Header, record) and
//                                     read(record)
//   scan<Value>(values, n)            -> Header, for n > 0 values
//   scale(header, largest)            -> BlockScale, for the largest magnitude of a block
//   scale_of_byte(header, byte)       -> the scale that a decoder uses
#pragma once

#include <cstdint>

#include "kernel/cpu/elements-inl.h"
#include "kernel/cpu/noise-inl.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

[[gnu::always_inline]] inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

template <BucketFormat kFormat>
struct BlockFormat {
  static constexpr BucketFormat kBlocks = kFormat;
  static constexpr Element kElement = element_of(kFormat);

  // Decoded values. scale: the block's.
  [[gnu::always_inline]] static Floats values(float scale, Ints codes) {
    return element_values<kElement>(codes, scale);
  }
};
template <typename Format>
concept HasBlocks = requires { Format::kBlocks; };

// The sizes of a format's blocks.
template <typename Format>
struct BlockShape {
  static constexpr int kNumel = block_numel(Format::kBlocks), kSteps = kNumel / kSixteen;
  static constexpr int kBits = Format::kElement.bits, kStepBytes = kSixteen * kBits / 8;
  static_assert(kNumel % kSixteen == 0);
};

// Encodes a block of n values, which begins at element `index` of its segment. Returns the address
// after it. keep(scale, i, n, values, codes) may store their errors.
template <typename Value, typename Format, bool kNoisy, typename Keep>
[[gnu::always_inline]] inline std::byte* encode_block(const Stored<typename Value::Bits>* values,
                                                      int n, uint64_t index,
                                                      const typename Format::Header& header,
                                                      Noise* noise, std::byte* block,
                                                      const Keep& keep) {
  using Shape = BlockShape<Format>;
  Floats16 some[Shape::kSteps];
  Ints16 largest{};
  for (int step = 0; step < Shape::kSteps; ++step) {
    const int first = step * kSixteen, rest = n - first;
    some[step] = rest >= kSixteen ? load16<Value>(values + first)
                                  : load_last<Value>(values + first, rest < 0 ? 0 : rest, 0.0f);
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) {
      const auto magnitude = Ints(magnitudes(some[step].at[i]));
      largest.at[i] = magnitude > largest.at[i] ? magnitude : largest.at[i];
    }
  }
  const BlockScale scale = Format::scale(header, __builtin_bit_cast(float, largest_lane(largest)));
  *block++ = static_cast<std::byte>(scale.byte);
  const Ints live = Ints{} - (is_finite(scale.value) ? 1 : 0);
  for (int step = 0; step < Shape::kSteps; ++step) {
    const int first = step * kSixteen;
    if (first >= n) break;
    Floats16 r{};
    if constexpr (kNoisy) r = noise->at(index + static_cast<uint64_t>(first));
    Ints16 codes;
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i)
      codes.at[i] =
          element_codes<Format::kElement, kNoisy>(some[step].at[i], scale.inverse, r.at[i]) & live;
    const int count = n - first < kSixteen ? n - first : kSixteen;
    keep(scale.value, first, count, some[step], codes);
    if (count == kSixteen) {
      pack16<Shape::kBits>(codes, block);
      block += Shape::kStepBytes;
    } else {
      const int bytes = (count * Shape::kBits + 7) / 8;
      BitField<Shape::kBits>::pack_last({codes}, bytes, count, block);
      block += bytes;
    }
  }
  return block;
}

template <typename Value, typename Format, bool kNoisy, typename Keep>
[[gnu::always_inline]] inline void encode_blocks(const void* from, const BucketRun& run,
                                                 const Rounding& rounding, std::byte* records,
                                                 const Keep& keep) {
  constexpr int64_t kBlock = BlockShape<Format>::kNumel;
  const auto* values = static_cast<const Stored<typename Value::Bits>*>(from);
  Noise noise(rounding);
  for (int64_t start = 0; start < run.numel; start += run.bucket_size) {
    const int64_t n = at_most(run.bucket_size, run.numel - start);
    const typename Format::Header header = Format::template scan<Value>(values + start, n);
    Format::write(header, records);
    records += header_bytes(Format::kBlocks);
    const auto encode = [&](int64_t at, int count) {
      records = encode_block<Value, Format, kNoisy>(
          values + start + at, count, static_cast<uint64_t>(run.first_index + start + at), header,
          &noise, records,
          [&](float scale, int i, int some, const Floats16& x, const Ints16& codes) {
            keep(scale, start + at + i, some, x, codes);
          });
    };
    int64_t at = 0;
    for (; at + kBlock <= n; at += kBlock) encode(at, kBlock);
    if (at < n) encode(at, static_cast<int>(n - at));
  }
}

// keep(scale, first, n, values, codes) is called for n <= 16 values at a time, from element
// `first` on.
template <typename Value, HasBlocks Format, typename Keep>
[[gnu::always_inline]] inline void quantize_as(const void* from, const BucketRun& run,
                                               const Rounding& rounding, std::byte* records,
                                               const Keep& keep) {
  if (rounding.mode == RoundingMode::kStochastic)
    encode_blocks<Value, Format, true>(from, run, rounding, records, keep);
  else
    encode_blocks<Value, Format, false>(from, run, rounding, records, keep);
}

// Calls deliver(first, n, decoded) for every sixteen values of every block; the last may be fewer.
template <HasBlocks Format, typename Deliver>
[[gnu::always_inline]] inline void decode_records(const std::byte* __restrict records,
                                                  const BucketRun& run, const Deliver& deliver) {
  using Shape = BlockShape<Format>;
  for (int64_t start = 0; start < run.numel; start += run.bucket_size) {
    const int64_t n = at_most(run.bucket_size, run.numel - start);
    const typename Format::Header header = Format::read(records);
    records += header_bytes(Format::kBlocks);
    float scale = 0.0f;
    for (int64_t at = 0; at < n; at += kSixteen) {
      if (at % Shape::kNumel == 0)
        scale = Format::scale_of_byte(header, static_cast<uint32_t>(*records++));
      const auto decoded = [scale](Ints codes) { return Format::values(scale, codes); };
      const auto count = static_cast<int>(at_most(kSixteen, n - at));
      if (count == kSixteen) {
        deliver(start + at, kSixteen, map<Floats16>(unpack16<Shape::kBits>(records), decoded));
        records += Shape::kStepBytes;
      } else {
        const int bytes = (count * Shape::kBits + 7) / 8;
        Ints16 codes[1];
        BitField<Shape::kBits>::unpack_last(records, bytes, count, codes);
        deliver(start + at, count, map<Floats16>(codes[0], decoded));
        records += bytes;
      }
    }
  }
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
