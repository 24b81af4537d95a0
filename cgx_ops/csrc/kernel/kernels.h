// Arithmetic on one rank, over raw pointers. Every CPU target and kernel/cuda must produce these
// results bit for bit. docs/reference/wire_format.md and docs/explanation/numerics.md define the
// arithmetic.
//
// All targets are compiled from kernel/cpu/kernels-inl.h. kernels() selects one on first use: the
// best that this CPU supports, or the one in CGX_CPU_TARGET.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/types.h"
#include "kernel/bucket_format.h"
#include "kernel/entropy.h"
#include "kernel/rans.h"

namespace cgx {

// A run of whole buckets (the last may be short) of one segment.
struct BucketRun {
  int64_t numel = 0;
  int64_t first_index = 0;  // of the first element in its segment: a multiple of bucket_size
  int64_t bucket_size = 1;
  int bits = 4;  // of a code, for formats with several widths
  BucketFormat format = BucketFormat::kUniform;
  bool clip = false;  // for kTernary
};

// Callers must hold a FloatMode (base/float_mode.h). Pointers may be unaligned. Sums, products and
// quotients that are NaN become 0x7fc00000, because processors keep different payloads.
struct Kernels {
  const char* name;  // "baseline", "avx2", "avx512", "neon"
  const char* description;

  // Encodes values of `dtype` to contiguous records, each with a header and a field of codes
  // (bucket_format.h). Writes only the bytes of the records. Formats other than kUniform support
  // fp32 only, here and in dequantize.
  void (*quantize)(Dtype dtype, const void* values, const BucketRun& run, const Rounding& rounding,
                   std::byte* records);
  // Like quantize() for fp32, but also computes the quantization errors: values - decoded, or 0 if
  // that is not finite. `errors` may be `values`.
  void (*quantize_keeping)(const float* values, const BucketRun& run, const Rounding& rounding,
                           std::byte* records, float* errors);
  // Decodes records and rounds the values to `dtype`.
  void (*dequantize)(const std::byte* records, const BucketRun& run, Dtype dtype, void* values);
  // sum[i] = base[i] + decoded value i, in fp32. `base` may be `sum`, here and in add.
  void (*dequantize_add)(const std::byte* records, const BucketRun& run, const float* base,
                         float* sum);
  // For kUniform, the sum over buckets of n * (max - min)^2 for n values, with the difference in
  // fp32. Otherwise the sum of squares. In fp64, bucket by bucket. NaN if a value is not finite.
  double (*measure)(Dtype dtype, const void* values, const BucketRun& run);

  // Converts uncompressed values. Equal types are copied bit for bit. `from` and `to` must not
  // overlap, but may be equal if the types are.
  void (*convert)(Dtype from_type, const void* from, Dtype to_type, void* to, int64_t numel);
  // Like convert() for fp32, but also computes errors, as quantize_keeping does.
  void (*convert_keeping)(const float* from, Dtype to_type, void* to, float* errors, int64_t numel);
  void (*add)(Dtype dtype, const void* values, const float* base, float* sum, int64_t numel);
  // sum = base + 0, for values that are not sent. Converts -0 to 0, and NaN to the canonical NaN.
  void (*add_zero)(const float* base, float* sum, int64_t numel);
  // sum = a + b, both of `dtype`, in fp32. With fp32 the sum may be a or b.
  void (*add_two)(Dtype dtype, const void* a, const void* b, float* sum, int64_t numel);
  // into = op(into, values); avg adds. For min and max, NaN wins and -0 < +0.
  void (*combine)(Op op, const float* values, float* into, int64_t numel);
  void (*divide)(float* values, float divisor, int64_t numel);
  // difference = values - decoded; scaled = values * scale, rounded to `dtype`. Non-finite results
  // become 0, and results out of the range of `dtype` its largest value. In fp32 the result may be
  // `values`.
  void (*subtract)(const float* values, const float* decoded, float* difference, int64_t numel);
  void (*scale)(const float* values, float scale, Dtype dtype, void* scaled, int64_t numel);
  // Rounds to 16 bits stochastically. first_index: of the first value in its segment, for the
  // noise.
  void (*convert_noisily)(Dtype from_type, const void* from, int64_t numel, int64_t first_index,
                          const Rounding& rounding, Dtype to_type, void* to);

  // Counts the values of at least this magnitude, including non-finite ones.
  int64_t (*count_from)(const float* values, int64_t numel, float magnitude);
  // Writes their indices in ascending order, at most `most`. Returns their number, or most + 1 if
  // there are more.
  int64_t (*indices_from)(const float* values, int64_t numel, float magnitude, int64_t most,
                          uint32_t* indices);
  // Writes the indices of the k largest magnitudes in ascending order; of equal ones the first.
  // Non-finite values are larger than all others. 0 < k <= numel < 2^32.
  void (*select_largest)(const float* values, int64_t numel, int64_t k, uint32_t* indices);
  // A Hadamard transform with signs, of blocks of `size` values of one bucket; and its inverse.
  void (*rotate)(float* values, int64_t numel, int size);
  void (*rotate_back)(float* values, int64_t numel, int size);

  // Splits values of `width` bytes (2 or 4) into as many planes of bytes, and joins them. A value
  // is rotated left by one bit, so that its sign becomes the lowest bit. Plane p has byte p of each
  // value, from the highest on: plane 0 of fp32 and bf16 is the exponent.
  void (*split_planes)(int64_t width, const void* values, int64_t numel, uint8_t* const* planes);
  void (*join_planes)(int64_t width, const uint8_t* const* planes, int64_t numel, void* values);

  // Counts each of the 256 symbols.
  void (*count_symbols)(const uint8_t* symbols, int64_t numel, uint32_t* counts);
  // Writes a stream of symbols and returns its size, at most most_rans_bytes(numel, lanes), which
  // `bytes` has room for. `lanes`: a power of two, at most kMostRansLanes. `frequencies`: 256,
  // whose sum is kFrequencySum; that of each symbol in the input is not 0.
  int64_t (*rans_encode)(const uint8_t* symbols, int64_t numel, int lanes,
                         const uint16_t* frequencies, std::byte* bytes);
  // Returns false if the `size` bytes are not a stream of `numel` symbols. Then the symbols are
  // undefined. Reads only these bytes, whatever they are.
  bool (*rans_decode)(const std::byte* bytes, int64_t size, int64_t numel, int lanes,
                      const uint16_t* frequencies, uint8_t* symbols);

  // Returns the bits of the largest magnitude, and whether the bits of all values are the same.
  uint32_t (*survey)(const float* values, int64_t numel, bool* same);
  // Writes the symbol of each value, the low bits of its level if the grid has any, and the extra
  // bits of values far from 0. Returns the number of the latter. `symbols` and `low` have room for
  // whole groups of sixteen. `stride`: the distance of groups in the block, for a sample of it.
  int64_t (*entropy_symbols)(const float* values, int64_t numel, int64_t stride,
                             const EntropyGrid& grid, uint8_t* symbols, uint8_t* low,
                             uint32_t* extra);
  // Like count_symbols(), but fast if most symbols are low.
  void (*count_low_symbols)(const uint8_t* symbols, int64_t numel, uint32_t* counts);
  // Restores values from symbols (below kEntropySymbols). `first`: the position of the first one in
  // its block. Returns how many elements of `extra` it read.
  int64_t (*entropy_values)(const uint8_t* symbols, const uint8_t* low, const uint32_t* extra,
                            int64_t numel, int64_t first, const EntropyGrid& grid, float* values);
};

// Returns the selected target. Throws Error(CGX_INVALID_ARGUMENT) if CGX_CPU_TARGET is unknown or
// this CPU does not support it.
const Kernels& kernels();
// The targets that this CPU supports, best first.
std::vector<const Kernels*> available_kernels();

}  // namespace cgx
