// The table of codecs, and the selection of a row.
#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "base/status.h"
#include "compressor/bucketed.h"
#include "compressor/codec.h"
#include "compressor/entropy.h"
#include "compressor/lossless.h"
#include "compressor/plain.h"
#include "compressor/sparse.h"
#include "compressor/wrappers.h"

namespace cgx {
namespace {

constexpr const char* kNotOnDevices = "it has CPU kernels only";
using enum RoundingMode;

// Whether the settings are compressed by `kCompressor`.
template <cgx_compressor_t kCompressor>
bool is(const CodecSettings& settings) {
  return settings.bits != kExactBits && settings.compressor == kCompressor;
}

// A codec of buckets. kBits: bits of a code, or 0 for those of the settings.
template <BucketFormat kFormat, int kBits>
std::unique_ptr<Codec> bucketed(const CodecSettings& settings) {
  return make_bucketed(settings, kFormat, kBits != 0 ? kBits : settings.bits);
}

template <BucketFormat kFormat, int kBits>
Coding coding(const CodecSettings& settings) {
  const int bits = kBits != 0 ? kBits : settings.bits;
  return {.format = kFormat, .bits = static_cast<uint8_t>(bits), .clip = settings.clip};
}

Coding sparse_coding(const CodecSettings& settings) {
  const bool drawn = settings.compressor == CGX_RANDK;
  const bool exact = drawn || settings.value_bits == kExactBits;
  require(exact || settings.value_bits == kHalfBits, CGX_UNSUPPORTED,
          "value_bits=", settings.value_bits, " is not supported on GPUs: use 16 or 32");
  require(settings.density <= kMostDensityOnDevices, CGX_UNSUPPORTED, "density is ",
          static_cast<double>(settings.density) * 1e-9, "; GPUs support at most 0.25");
  return {.bits = static_cast<uint8_t>(exact ? kExactBits : kHalfBits),
          .drawn = drawn,
          .density = static_cast<uint32_t>(settings.density)};
}

std::string uniform_diverges(const CodecSettings& settings, RoundingMode /*rounding*/) {
  if (settings.bits > 1) return "";
  return "at 1 bit the error may be as large as the values, so residuals may grow without bound: "
         "use 2 bits or more, or compressor='levels'";
}

std::string qsgd_diverges(const CodecSettings& settings, RoundingMode /*rounding*/) {
  const double levels = (1 << (settings.bits - 1)) - 1, root = std::sqrt(settings.bucket_size);
  const double error = std::min(settings.bucket_size / (levels * levels), root / levels);
  if (error < 1) return "";
  return join("the squared error of ", settings.bits, " bits in buckets of ", settings.bucket_size,
              " may be ", error, " times the squared signal: use more bits or smaller buckets");
}

std::string ternary_diverges(const CodecSettings& settings, RoundingMode /*rounding*/) {
  if (settings.clip) return "";
  return "without clip=True its error is larger than the signal";
}

std::string votes_have_no_loss(const CodecSettings& /*settings*/, RoundingMode /*rounding*/) {
  return "a vote has no magnitude, so its quantization error is not defined: use "
         "compressor='levels' "
         "with bits=1, which sends as many bytes";
}

std::string entropy_diverges(const CodecSettings& /*settings*/, RoundingMode rounding) {
  if (rounding != kShift) return "";
  return "with rounding='shift' its error exceeds the signal at rates up to 1 and in layers of a "
         "few hundred values: use rounding='nearest', or error_feedback=False";
}

std::vector<CodecEntry>& table() {
  static std::vector<CodecEntry> table = {
      {.name = "none",
       .description = "uncompressed values (32 bits)",
       .fixed_length = true,
       .serves = [](const CodecSettings& settings) { return settings.bits == kExactBits; },
       .make = make_none,
       .device_coding = [](const CodecSettings&) { return Coding{}; }},
      {.name = "uniform",
       .description = "1-8 bits: levels between each bucket's minimum and maximum",
       .fixed_length = true,
       .serves = is<CGX_UNIFORM>,
       .make = bucketed<BucketFormat::kUniform, 0>,
       .device_coding = coding<BucketFormat::kUniform, 0>,
       .lowest_bits = 1,
       .highest_bits = 8,
       .roundings = {kStochastic, kNearest, kShift},
       .knobs = {"rotation"},
       .biased = true,
       .no_feedback = uniform_diverges},
      {.name = "levels",
       .description = "1-4 bits: fixed levels times each bucket's root mean square",
       .fixed_length = true,
       .serves = is<CGX_LEVELS>,
       .make = bucketed<BucketFormat::kLevels, 0>,
       .device_coding = coding<BucketFormat::kLevels, 0>,
       .lowest_bits = 1,
       .highest_bits = 4,
       .knobs = {"rotation"},
       .biased = true},
      {.name = "sign",
       .description = "signs; the sum is a majority vote",
       .fixed_length = true,
       .serves = is<CGX_SIGN>,
       .make = bucketed<BucketFormat::kSign, 1>,
       .device_coding = coding<BucketFormat::kSign, 1>,
       .no_feedback = votes_have_no_loss},
      {.name = "onebit",
       .description = "signs; each bucket's means of the negative and of the other values",
       .fixed_length = true,
       .serves = is<CGX_ONEBIT>,
       .make = bucketed<BucketFormat::kOnebit, 1>,
       .device_coding = coding<BucketFormat::kOnebit, 1>,
       .knobs = {"rotation"},
       .biased = true},
      {.name = "ternary",
       .description = "-1, 0 or 1 times each bucket's largest magnitude, five to a byte",
       .fixed_length = true,
       .serves = is<CGX_TERNARY>,
       .make = bucketed<BucketFormat::kTernary, 2>,
       .device_coding = coding<BucketFormat::kTernary, 2>,
       .roundings = {kStochastic},
       .knobs = {"rotation", "clip"},
       .no_feedback = ternary_diverges},
      {.name = "qsgd",
       .description = "2-8 bits: signs and levels of each bucket's 2-norm",
       .fixed_length = true,
       .serves = is<CGX_QSGD>,
       .make = bucketed<BucketFormat::kQsgd, 0>,
       .device_coding = coding<BucketFormat::kQsgd, 0>,
       .lowest_bits = 2,
       .highest_bits = 8,
       .roundings = {kStochastic},
       .knobs = {"rotation"},
       .no_feedback = qsgd_diverges},
      {.name = "half",
       .description = "16 bits: bf16, or fp16 where the tensor is",
       .fixed_length = true,
       .serves = is<CGX_HALF>,
       .make = make_half,
       .device_coding = [](const CodecSettings&) { return Coding{.bits = kHalfBits}; },
       .roundings = {kNearest, kStochastic}},
      {.name = "topk",
       .description = "each bucket's largest magnitudes, and their indices",
       .fixed_length = true,
       .serves = is<CGX_TOPK>,
       .make = make_topk,
       .device_coding = sparse_coding,
       .knobs = {"density", "value_bits"},
       .biased = true},
      {.name = "randk",
       .description = "values at random indices, which all ranks draw from one seed",
       .fixed_length = true,
       .serves = is<CGX_RANDK>,
       .make = make_randk,
       .device_coding = sparse_coding,
       .knobs = {"density"},
       .biased = true},
      {.name = "entropy",
       .description = "0.25-8 bits per value: evenly spaced levels with codes of variable length",
       .fixed_length = false,
       .serves = is<CGX_ENTROPY>,
       .make = make_entropy,
       .why_not = kNotOnDevices,
       .roundings = {kNearest, kShift},
       .knobs = {"rate"},
       .biased = true,
       .no_feedback = entropy_diverges},
      {.name = "lossless",
       .description = "exact values; their exponents are entropy-coded",
       .fixed_length = false,
       .serves = is<CGX_LOSSLESS>,
       .make = make_lossless,
       .why_not = kNotOnDevices,
       .exact = true},
      {.name = "mxfp8",
       .description = "8-bit floats (e4m3); 32 values share a power of two (OCP MX)",
       .fixed_length = true,
       .serves = is<CGX_MXFP8>,
       .make = bucketed<BucketFormat::kMxfp8, 8>,
       .device_coding = coding<BucketFormat::kMxfp8, 8>,
       .roundings = {kNearest, kStochastic},
       .knobs = {"rotation"},
       .bucket_size = kBucketOfBlocks,
       .biased = true},
      {.name = "mxfp8_e5m2",
       .description = "8-bit floats (e5m2); 32 values share a power of two (OCP MX)",
       .fixed_length = true,
       .serves = is<CGX_MXFP8_E5M2>,
       .make = bucketed<BucketFormat::kMxfp8E5m2, 8>,
       .device_coding = coding<BucketFormat::kMxfp8E5m2, 8>,
       .roundings = {kNearest, kStochastic},
       .knobs = {"rotation"},
       .bucket_size = kBucketOfBlocks,
       .biased = true},
      {.name = "mxfp4",
       .description = "4-bit floats (e2m1); 32 values share a power of two (OCP MX)",
       .fixed_length = true,
       .serves = is<CGX_MXFP4>,
       .make = bucketed<BucketFormat::kMxfp4, 4>,
       .device_coding = coding<BucketFormat::kMxfp4, 4>,
       .roundings = {kNearest, kStochastic},
       .knobs = {"rotation"},
       .bucket_size = kBucketOfBlocks,
       .biased = true},
      {.name = "nvfp4",
       .description = "4-bit floats (e2m1); 16 values share a scale (e4m3), each bucket another",
       .fixed_length = true,
       .serves = is<CGX_NVFP4>,
       .make = bucketed<BucketFormat::kNvfp4, 4>,
       .device_coding = coding<BucketFormat::kNvfp4, 4>,
       .roundings = {kNearest, kStochastic},
       .knobs = {"rotation"},
       .biased = true},
  };
  return table;
}

}  // namespace

const std::vector<CodecEntry>& codec_table() { return table(); }

void add_codec(const CodecEntry& entry) { table().insert(table().begin(), entry); }

const CodecEntry& codec_entry(const CodecSettings& settings) {
  require(settings.bucket_size >= 1, CGX_INVALID_ARGUMENT, "bucket_size=", settings.bucket_size,
          "; it must be at least 1");
  for (const CodecEntry& entry : codec_table()) {
    if (!entry.serves(settings)) continue;
    if (settings.bits != kExactBits && entry.highest_bits != 0 && !entry.has_bits(settings.bits))
      break;
    return entry;
  }
  fail(CGX_INVALID_ARGUMENT, "bits=", settings.bits, "; it must be 1 to 8, or 32 (uncompressed)");
}

const CodecEntry& compressor_entry(int64_t compressor) {
  CodecSettings settings;
  settings.compressor = static_cast<cgx_compressor_t>(compressor);
  settings.bits = 0;
  for (const CodecEntry& entry : table())
    if (entry.serves(settings)) return entry;
  fail(CGX_INTERNAL, "no row of the codecs' table has the compressor ", compressor);
}

std::unique_ptr<Codec> make_codec(const CodecSettings& settings) {
  const CodecEntry& entry = codec_entry(settings);
  auto codec = entry.make(settings);
  if (settings.bits == kExactBits) return codec;
  if (settings.rotation != 0) codec = make_rotated(std::move(codec), settings.rotation);
  if (settings.skip_incomplete_buckets && codec->fixed_length() && codec->grain() > 1)
    codec = make_whole_buckets(std::move(codec), make_none(settings), settings.bucket_size);
  return codec;
}

void check_feedback(std::span<const CodecSettings> stages, RoundingMode rounding) {
  for (const CodecSettings& settings : stages) {
    const CodecEntry& entry = codec_entry(settings);
    const std::string why = entry.no_feedback ? entry.no_feedback(settings, rounding) : "";
    require(why.empty(), CGX_INVALID_ARGUMENT, "error feedback does not converge with compressor='",
            entry.name, "': ", why);
  }
}

DeviceRuns device_runs(const CodecSettings& settings, int64_t numel) {
  const CodecEntry& entry = codec_entry(settings);
  require(entry.device_coding, CGX_UNSUPPORTED, "compressor='", entry.name,
          "' is not supported on GPUs: ", entry.why_not);
  Coding coding = entry.device_coding(settings);
  const bool has_buckets = coding.density != 0 || coding.bits <= 8;
  DeviceRuns runs;
  if (!has_buckets) {
    if (numel > 0) runs.add({0, numel, coding});
    return runs;
  }
  const bool whole = coding.density != 0 || settings.rotation != 0;
  require(
      !whole || settings.bucket_size <= kMostWholeOnDevices, CGX_UNSUPPORTED, "compressor='",
      entry.name, "' with rotation=", settings.rotation, " and buckets of ", settings.bucket_size,
      " values: on GPUs such buckets must fit shared memory, so use at most ", kMostWholeOnDevices);
  coding.rotation_log = static_cast<uint8_t>(std::bit_width(unsigned(settings.rotation | 1)) - 1);
  const int64_t exact = settings.skip_incomplete_buckets ? numel % settings.bucket_size : 0;
  if (exact < numel) runs.add({0, numel - exact, coding});
  if (exact > 0) runs.add({numel - exact, exact, {}});
  return runs;
}

}  // namespace cgx
