// How a bucket of values lies in bytes: a header, then a field of small codes. Each format has its
// arithmetic in a file of its name in kernel/cpu; docs/wire_format.md spells it out.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace cgx {

enum class BucketFormat : int32_t {
  kUniform,     // {fp32 min, fp32 step}; levels
  kLevels,      // {bf16 scale}; sign and magnitude's level
  kSign,        // as kLevels of 1 bit, with scale 1
  kOnebit,      // {bf16 mean of the others, bf16 mean of the negative}; 1 bit
  kTernary,     // {bf16 scale}; -1, 0, 1, five to a byte
  kQsgd,        // {bf16 norm}; sign and level
  kNatural,     // {bf16 power of two}; sign and exponent, 8 bits
  kMagnitudes,  // {bf16 lowest, bf16 highest magnitude}; sign and level of magnitude
};

CGX_HD constexpr int64_t header_bytes(BucketFormat format) {
  if (format == BucketFormat::kUniform) return 8;
  return format == BucketFormat::kOnebit || format == BucketFormat::kMagnitudes ? 4 : 2;
}

// ceil(numel * bits / 8), or of trits ceil(numel / 5), which cannot overflow before the result.
CGX_HD constexpr int64_t field_bytes(BucketFormat format, int64_t numel, int bits) {
  if (format == BucketFormat::kTernary) return numel / 5 + (numel % 5 != 0);
  return numel / 8 * bits + (numel % 8 * bits + 7) / 8;
}

}  // namespace cgx
