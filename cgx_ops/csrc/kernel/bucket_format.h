// The representations of values in a message: unchanged, in 16 bits, or in buckets. A bucket is a
// header and a field of short codes. In block formats, the field is a sequence of blocks, each a
// scale and its codes. The arithmetic of each format is in a file of its name in kernel/cpu, and
// for GPUs in kernel/cuda/uniform.h and formats.h; that of block formats is in kernel/elements.h,
// mx.h and nvfp4.h. docs/reference/compressor_formats.md and block_formats.md define it.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "base/types.h"

namespace cgx {

enum class BucketFormat : uint8_t {
  kUniform,     // {fp32 min, fp32 step}; levels
  kLevels,      // {bf16 scale}; sign and level of the magnitude
  kSign,        // as kLevels with 1 bit, with scale 1
  kOnebit,      // {bf16 mean of the others, bf16 mean of the negative}; 1 bit
  kTernary,     // {bf16 scale}; -1, 0, 1, five per byte
  kQsgd,        // {bf16 norm}; sign and level
  kMagnitudes,  // {bf16 lowest, bf16 highest magnitude}; sign and level of the magnitude
  kMxfp8,       // {}; blocks of 32: {e8m0 scale}; e4m3
  kMxfp8E5m2,   // {}; blocks of 32: {e8m0 scale}; e5m2
  kMxfp4,       // {}; blocks of 32: {e8m0 scale}; e2m1
  kNvfp4,       // {fp32 scale}; blocks of 16: {e4m3 scale}; e2m1
};

CGX_HD constexpr bool has_blocks(BucketFormat format) { return format >= BucketFormat::kMxfp8; }
// Values that share a scale of one byte. Blocks are counted from the start of a bucket.
CGX_HD constexpr int block_numel(BucketFormat format) {
  return format == BucketFormat::kNvfp4 ? 16 : 32;
}
// The size of buckets without a header, which does not affect the bytes: a multiple of a block.
inline constexpr int64_t kBucketOfBlocks = 512;

CGX_HD constexpr int64_t header_bytes(BucketFormat format) {
  if (format == BucketFormat::kUniform) return 8;
  if (has_blocks(format)) return format == BucketFormat::kNvfp4 ? 4 : 0;
  return format == BucketFormat::kOnebit || format == BucketFormat::kMagnitudes ? 4 : 2;
}

// ceil(numel * bits / 8), plus a byte per block; or ceil(numel / 5) for trits. Cannot overflow
// unless the result does.
CGX_HD constexpr int64_t field_bytes(BucketFormat format, int64_t numel, int bits) {
  if (format == BucketFormat::kTernary) return numel / 5 + (numel % 5 != 0);
  const int64_t codes = numel / 8 * bits + (numel % 8 * bits + 7) / 8;
  if (!has_blocks(format)) return codes;
  const int block = block_numel(format);
  return codes + numel / block + (numel % block != 0);
}

// Magnitude `level` of the 2^(bits - 1) levels of kLevels: optimal for Gaussian values with a mean
// square of 1 (Lloyd, 1982; Max, 1960).
CGX_HD float gaussian_level(int bits, int level) {
  static constexpr float kAt[] = {1.0f,                                // 1 bit
                                  0.4528f, 1.5104f,                    // 2
                                  0.2451f, 0.7560f, 1.3439f, 2.1520f,  // 3
                                  0.1284f, 0.3880f, 0.6568f, 0.9423f,  // 4
                                  1.2562f, 1.6180f, 2.0690f, 2.7326f};
  return kAt[(1 << (bits - 1)) - 1 + level];
}

// The encoding of a run of values, for GPU kernels.
inline constexpr int kHalfBits = 16;
struct Coding {
  BucketFormat format = BucketFormat::kUniform;
  uint8_t bits = kExactBits;  // of a code; or kExactBits: uncompressed; or kHalfBits: bf16, or fp16
                              // for fp16 tensors
  bool clip : 1 = false;      // for kTernary
  bool drawn : 1 = false;     // values at random indices, derived from the seed
  uint8_t rotation_log = 0;   // values are rotated in blocks of 2^this; 0: not rotated
  uint32_t density = 0;       // share of a bucket's values that are sent, in billionths; 0: all
  bool operator==(const Coding&) const = default;
};

// GPUs hold a whole bucket of rotated or sparse values in shared memory, and send at most a quarter
// of its values.
inline constexpr int64_t kMostWholeOnDevices = 8192;
inline constexpr int64_t kMostDensityOnDevices = 250000000;

inline constexpr uint32_t kIndicesPhase = 0x706c6163;  // for random indices; differs from all
                                                       // phases of noise

// The number of values sent: max(1, ceil(density * numel)), 0 < numel <= kMostWholeOnDevices.
CGX_HD int64_t chosen_of(int64_t numel, uint32_t density) {
  const int64_t share = (numel * density + 999999999) / 1000000000;
  return share < 1 ? 1 : share;
}

}  // namespace cgx
