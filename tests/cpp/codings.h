// Encodings of GPU kernels (kernel/bucket_format.h), and the matching CPU codecs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "compressor/codec.h"
#include "kernel/bucket_format.h"
#include "kernel/cuda/launches.h"

namespace cgx::test {

inline cgx_compressor_t compressor_of(BucketFormat format) {
  switch (format) {
    case BucketFormat::kLevels:
      return CGX_LEVELS;
    case BucketFormat::kSign:
      return CGX_SIGN;
    case BucketFormat::kOnebit:
      return CGX_ONEBIT;
    case BucketFormat::kTernary:
      return CGX_TERNARY;
    case BucketFormat::kQsgd:
      return CGX_QSGD;
    case BucketFormat::kMxfp8:
      return CGX_MXFP8;
    case BucketFormat::kMxfp8E5m2:
      return CGX_MXFP8_E5M2;
    case BucketFormat::kMxfp4:
      return CGX_MXFP4;
    case BucketFormat::kNvfp4:
      return CGX_NVFP4;
    default:
      return CGX_UNIFORM;
  }
}

// `seed` selects the indices of randk.
inline CodecSettings settings_of(Dtype dtype, const Coding& coding, int64_t bucket_size,
                                 uint64_t seed) {
  CodecSettings settings{.dtype = dtype, .bits = coding.bits, .bucket_size = bucket_size};
  if (coding.density != 0) {
    settings.compressor = coding.drawn ? CGX_RANDK : CGX_TOPK;
    settings.density = coding.density;
    settings.value_bits = coding.bits;
    settings.bits = 4;
    settings.seed = seed;
    return settings;
  }
  if (coding.bits == kExactBits) return settings;
  settings.compressor = compressor_of(coding.format);
  settings.clip = coding.clip;
  if (coding.rotation_log > 0) settings.rotation = 1 << coding.rotation_log;
  // Only these formats have a choice of bits.
  const bool has_bits = coding.format == BucketFormat::kUniform ||
                        coding.format == BucketFormat::kLevels ||
                        coding.format == BucketFormat::kQsgd;
  if (coding.bits == kHalfBits) settings.compressor = CGX_HALF;
  if (!has_bits || coding.bits == kHalfBits) settings.bits = 4;
  return settings;
}

inline std::unique_ptr<Codec> codec_of(Dtype dtype, const Coding& coding, int64_t bucket_size,
                                       uint64_t seed = 0) {
  return make_codec(settings_of(dtype, coding, bucket_size, seed));
}

// The codec of a piece of a message or of a reduced piece.
inline std::unique_ptr<Codec> codec_of(Dtype dtype, const device::Piece& piece,
                                       const Coding& coding) {
  return codec_of(dtype, coding, piece.bucket_size, piece.seed);
}

inline std::string text_of(const Coding& coding) {
  return join("format ", int(coding.format), " bits ", int(coding.bits), " clip ", coding.clip,
              " rotation ", int(coding.rotation_log), " density ", coding.density, " drawn ",
              coding.drawn);
}

// All encodings that GPUs support: exact values, uniform buckets, then others.
inline std::vector<Coding> codings() {
  using enum BucketFormat;
  std::vector<Coding> all = {{}};
  for (uint8_t bits = 1; bits <= 8; ++bits) all.push_back({.bits = bits});
  for (uint8_t bits = 1; bits <= 4; ++bits) all.push_back({kLevels, bits});
  for (uint8_t bits = 2; bits <= 8; bits += 2) all.push_back({kQsgd, bits});
  const Coding others[] = {
      {kSign, 1},
      {kOnebit, 1},
      {kTernary, 2},
      {kTernary, 2, true},
      {kUniform, kHalfBits},
      {kUniform, 4, false, false, 5},  // these are rotated
      {kLevels, 2, false, false, 7},
      {kOnebit, 1, false, false, 10},
      {kTernary, 2, true, false, 1},
      {kQsgd, 5, false, false, 3},
      {kUniform, 8, false, false, 10},
      {kMxfp8, 8},
      {kMxfp8E5m2, 8},
      {kMxfp4, 4},
      {kNvfp4, 4},
      {kMxfp8, 8, false, false, 4},
      {kNvfp4, 4, false, false, 6},
      {.bits = kExactBits, .density = 10'000'000},  // these send a part of the values
      {.bits = kHalfBits, .density = kMostDensityOnDevices},
      {.bits = kExactBits, .drawn = true, .density = 30'000'000},
      {.bits = kExactBits, .drawn = true, .density = kMostDensityOnDevices}};
  all.insert(all.end(), std::begin(others), std::end(others));
  return all;
}

// Whether GPU kernels hold whole buckets in shared memory.
inline bool is_whole(const Coding& coding) {
  return coding.rotation_log != 0 || coding.density != 0;
}

inline bool is_vote(const Coding& coding) {
  return coding.bits != kExactBits && coding.format == BucketFormat::kSign;
}

// Replaces the values of a piece by votes, if its format is a vote.
inline void vote(const Coding& coding, int64_t bucket_size, float* values, int64_t numel) {
  if (!is_vote(coding)) return;
  const auto codec = codec_of(Dtype::kFloat32, coding, bucket_size);
  std::vector<std::byte> bytes(static_cast<size_t>(codec->max_bytes(numel)));
  codec->encode(Dtype::kFloat32, values, numel, 0, {}, bytes.data());
  codec->decode(bytes, numel, 0, Dtype::kFloat32, values);
}

}  // namespace cgx::test
