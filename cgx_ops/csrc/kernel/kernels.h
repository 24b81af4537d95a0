// Arithmetic on one rank, over raw pointers: the contract that every CPU target, and kernel/cuda,
// fulfils to the same bit. docs/reference/wire_format.md and docs/explanation/numerics.md spell the arithmetic out.
//
// All targets are compiled from kernel/cpu/kernels-inl.h; kernels() picks one at first use: the
// best that this CPU runs, or the one that CGX_CPU_TARGET names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/types.h"
#include "kernel/bucket_format.h"

namespace cgx {

// A run of whole buckets (the last may be short) of one segment.
struct BucketRun {
  int64_t numel = 0;
  int64_t first_index = 0;  // of the first element, in its segment: a multiple of bucket_size
  int64_t bucket_size = 1;
  int bits = 4;  // of a code, where the format has several widths
  BucketFormat format = BucketFormat::kUniform;
  bool clip = false;  // of kTernary
};

// Callers hold a FloatMode (base/float_mode.h). Pointers need not be aligned to their type. A sum,
// product or quotient that is NaN is the NaN 0x7fc00000, because processors keep different
// payloads.
struct Kernels {
  const char* name;  // "baseline", "avx2", "avx512", "neon"
  const char* description;

  // values (of `dtype`) -> bucket records, laid end to end, each a header and a field of codes
  // (bucket_format.h). Writes exactly the bytes of the records. Formats other than kUniform take
  // fp32 only, here and in dequantize.
  void (*quantize)(Dtype dtype, const void* values, const BucketRun& run, const Rounding& rounding,
                   std::byte* records);
  // quantize() of fp32 that keeps what is lost: values - decoded, or 0 where that is not finite.
  // `lost` may be `values`.
  void (*quantize_keeping)(const float* values, const BucketRun& run, const Rounding& rounding,
                           std::byte* records, float* lost);
  // records -> values, rounded to `dtype`.
  void (*dequantize)(const std::byte* records, const BucketRun& run, Dtype dtype, void* values);
  // sum[i] = base[i] + decoded value i, in fp32. `base` may be `sum`, here and in add.
  void (*dequantize_add)(const std::byte* records, const BucketRun& run, const float* base,
                         float* sum);
  // Of kUniform the sum over buckets of n values of n * (max - min)^2, the difference in fp32, else
  // the sum of squares; in fp64, one bucket after the other. NaN if a value is not finite.
  double (*measure)(Dtype dtype, const void* values, const BucketRun& run);

  // Exact values. Equal types: a copy, bit for bit. `from` and `to` do not overlap, but
  // may be equal if the types are.
  void (*convert)(Dtype from_type, const void* from, Dtype to_type, void* to, int64_t numel);
  // convert() of fp32 that keeps what is lost, as quantize_keeping does.
  void (*convert_keeping)(const float* from, Dtype to_type, void* to, float* lost, int64_t numel);
  void (*add)(Dtype dtype, const void* values, const float* base, float* sum, int64_t numel);
  // sum = base + 0: what is not sent is a 0, which makes 0 of -0, and one NaN of all.
  void (*add_zero)(const float* base, float* sum, int64_t numel);
  // sum = a + b, both of `dtype`, in fp32; then the sum may be either of the two.
  void (*add_two)(Dtype dtype, const void* a, const void* b, float* sum, int64_t numel);
  // into = op(into, values); avg adds. NaN wins in min and max, and -0 < +0.
  void (*combine)(Op op, const float* values, float* into, int64_t numel);
  void (*divide)(float* values, float divisor, int64_t numel);
  // difference = values - decoded, scaled = values * scale rounded to `dtype`. Not finite: 0. Too
  // large for `dtype`: its largest. In fp32 the result may be the values.
  void (*subtract)(const float* values, const float* decoded, float* difference, int64_t numel);
  void (*scale)(const float* values, float scale, Dtype dtype, void* scaled, int64_t numel);
  // Rounds to 16 bits, at random. first_index: of the first value, in its segment, for the noise.
  void (*convert_noisily)(Dtype from_type, const void* from, int64_t numel, int64_t first_index,
                          const Rounding& rounding, Dtype to_type, void* to);

  // How many values have at least this magnitude; what is not finite has.
  int64_t (*count_from)(const float* values, int64_t numel, float magnitude);
  // Their places, in ascending order, `most` at most. Returns how many, or most + 1 if more.
  int64_t (*places_from)(const float* values, int64_t numel, float magnitude, int64_t most,
                         uint32_t* places);
  // The places of the k largest magnitudes, in ascending order; of equal ones the first; what is
  // not finite is larger than all else. 0 < k <= numel < 2^32.
  void (*select_largest)(const float* values, int64_t numel, int64_t k, uint32_t* places);
  // A Hadamard transform with signs, of blocks of `size` values of one bucket; and its inverse.
  void (*rotate)(float* values, int64_t numel, int size);
  void (*rotate_back)(float* values, int64_t numel, int size);
};

// The chosen target's table. Throws Error(CGX_INVALID_ARGUMENT) if CGX_CPU_TARGET names a target
// that is unknown or that this CPU does not run.
const Kernels& kernels();
// Those this CPU runs, best first.
std::vector<const Kernels*> available_kernels();

}  // namespace cgx
