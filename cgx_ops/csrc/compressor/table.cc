// The table of codecs, the choice from it, and what of a config belongs to a codec.
#include <algorithm>
#include <cmath>
#include <utility>

#include "base/status.h"
#include "compressor/around.h"
#include "compressor/bucketed.h"
#include "compressor/codec.h"
#include "compressor/half.h"
#include "compressor/none.h"
#include "compressor/sparse.h"
#include "config.h"

namespace cgx {
namespace {

constexpr const char* kNotOnDevices = "it has kernels for the CPU only";
constexpr int64_t kHundredth = 10000000;  // the default density, in billionths
using enum RoundingMode;

// What of a row follows from a compressor's number.
template <cgx_compressor_t kCompressor>
bool is(const CodecSettings& settings) {
  return settings.bits != kExactBits && settings.compressor == kCompressor;
}

// A codec of buckets; bits: of its codes, or 0: those of the settings.
template <BucketFormat kFormat, int kBits>
std::unique_ptr<Codec> bucketed(const CodecSettings& settings) {
  return make_bucketed(settings, kFormat, kBits != 0 ? kBits : settings.bits);
}

std::string qsgd_diverges(const CodecSettings& settings) {
  const double levels = (1 << (settings.bits - 1)) - 1, root = std::sqrt(settings.bucket_size);
  const double error = std::min(settings.bucket_size / (levels * levels), root / levels);
  if (error < 1) return "";
  return join("the error of ", settings.bits, " bits in buckets of ", settings.bucket_size,
              " may be ", error, " times the signal's square: give more bits or smaller buckets");
}

std::string ternary_diverges(const CodecSettings& settings) {
  if (settings.clip) return "";
  return "without clip=True its error is larger than the signal";
}

std::string votes_have_no_loss(const CodecSettings& /*settings*/) {
  return "a vote has no magnitude, so nothing can be told to be lost: compressor='levels' with "
         "bits=1 sends as much and has one";
}

std::vector<CodecEntry>& table() {
  static std::vector<CodecEntry> table = {
      {.name = "none",
       .description = "exact values (32 bits)",
       .sliced = true,
       .serves = [](const CodecSettings& settings) { return settings.bits == kExactBits; },
       .make = make_none,
       .device_runs = none_runs},
      {.name = "uniform",
       .description = "1-8 bits: levels between each bucket's minimum and maximum",
       .sliced = true,
       .serves = is<CGX_UNIFORM>,
       .make = bucketed<BucketFormat::kUniform, 0>,
       .device_runs = uniform_runs,
       .lowest_bits = 1,
       .highest_bits = 8,
       .roundings = {kStochastic, kNearest, kShift},
       .knobs = {"rotation"}},
      {.name = "levels",
       .description = "1-4 bits: fixed levels times each bucket's root mean square",
       .sliced = true,
       .serves = is<CGX_LEVELS>,
       .make = bucketed<BucketFormat::kLevels, 0>,
       .why_not = kNotOnDevices,
       .lowest_bits = 1,
       .highest_bits = 4,
       .knobs = {"rotation"},
       .biased = true},
      {.name = "sign",
       .description = "signs; the sum is a majority vote",
       .sliced = true,
       .serves = is<CGX_SIGN>,
       .make = bucketed<BucketFormat::kSign, 1>,
       .why_not = kNotOnDevices,
       .no_feedback = votes_have_no_loss},
      {.name = "onebit",
       .description = "signs; each bucket's means of the negative and of the other values",
       .sliced = true,
       .serves = is<CGX_ONEBIT>,
       .make = bucketed<BucketFormat::kOnebit, 1>,
       .why_not = kNotOnDevices,
       .knobs = {"rotation"},
       .biased = true},
      {.name = "ternary",
       .description = "-1, 0 or 1 times each bucket's largest magnitude, five to a byte",
       .sliced = true,
       .serves = is<CGX_TERNARY>,
       .make = bucketed<BucketFormat::kTernary, 2>,
       .why_not = kNotOnDevices,
       .roundings = {kStochastic},
       .knobs = {"rotation", "clip"},
       .no_feedback = ternary_diverges},
      {.name = "qsgd",
       .description = "2-8 bits: signs and levels of each bucket's 2-norm",
       .sliced = true,
       .serves = is<CGX_QSGD>,
       .make = bucketed<BucketFormat::kQsgd, 0>,
       .why_not = kNotOnDevices,
       .lowest_bits = 2,
       .highest_bits = 8,
       .roundings = {kStochastic},
       .knobs = {"rotation"},
       .no_feedback = qsgd_diverges},
      {.name = "natural",
       .description = "8 bits: signs and powers of two",
       .sliced = true,
       .serves = is<CGX_NATURAL>,
       .make = bucketed<BucketFormat::kNatural, 8>,
       .why_not = kNotOnDevices,
       .roundings = {kStochastic},
       .knobs = {"rotation"}},
      {.name = "half",
       .description = "16 bits: bf16, or fp16 where the tensor is",
       .sliced = true,
       .serves = is<CGX_HALF>,
       .make = make_half,
       .why_not = kNotOnDevices,
       .roundings = {kNearest, kStochastic}},
      {.name = "topk",
       .description = "each bucket's largest magnitudes, and their places",
       .sliced = true,
       .serves = is<CGX_TOPK>,
       .make = make_topk,
       .why_not = kNotOnDevices,
       .knobs = {"density", "value_bits"},
       .biased = true},
      {.name = "threshold",
       .description = "magnitudes above a threshold that a sample tells, and their places",
       .sliced = false,
       .serves = is<CGX_THRESHOLD>,
       .make = make_threshold,
       .why_not = kNotOnDevices,
       .knobs = {"density", "value_bits"},
       .biased = true},
      {.name = "randk",
       .description = "values at places that all ranks draw from one seed",
       .sliced = true,
       .serves = is<CGX_RANDK>,
       .make = make_randk,
       .why_not = kNotOnDevices,
       .knobs = {"density"},
       .biased = true},
  };
  return table;
}

// The row of a compressor by its number, for what does not depend on the bits.
const CodecEntry& compressor_entry(int64_t compressor) {
  CodecSettings settings;
  settings.compressor = static_cast<cgx_compressor_t>(compressor);
  settings.bits = 0;
  for (const CodecEntry& entry : table())
    if (entry.serves(settings)) return entry;
  fail(CGX_INTERNAL, "no row of the codecs' table has the compressor ", compressor);
}

bool has_bits(const CodecEntry& entry, int64_t bits) {
  return bits >= entry.lowest_bits && bits <= entry.highest_bits;
}

// "bits=7: the compressor levels has 1 to 4, and 32 (exact)".
void check_bits(const CodecEntry& entry, std::string_view name, int64_t bits) {
  if (bits == 0 || bits == kExactBits || has_bits(entry, bits)) return;
  if (entry.highest_bits == 0)
    fail(CGX_INVALID_ARGUMENT, name, " is ", bits, "; compressor='", entry.name,
         "' has no bits to choose: leave ", name, " out, or give 32 (exact)");
  fail(CGX_INVALID_ARGUMENT, name, " is ", bits, "; with compressor='", entry.name,
       "' it must be from ", entry.lowest_bits, " to ", entry.highest_bits, ", or 32 (exact)");
}

// Fields that not all compressors have, and whose 0 says that nothing was given.
void check_knobs(const CodecEntry& entry, const cgx_config_t& config) {
  static constexpr std::string_view kOptional[] = {"density", "value_bits", "rotation", "clip"};
  for (const ConfigField& field : config_table()) {
    const int64_t number = config.*field.value;
    const auto has = [&](const auto& names) {
      return std::find(std::begin(names), std::end(names), field.name) != std::end(names);
    };
    if (number == 0 || !has(kOptional) || has(entry.knobs)) continue;
    std::string others;
    for (const CodecEntry& other : table())
      if (std::find(other.knobs.begin(), other.knobs.end(), field.name) != other.knobs.end())
        others += join(others.empty() ? "" : ", ", other.name);
    fail(CGX_INVALID_ARGUMENT, field.name, " is ", config_text(field, number),
         ", which compressor='", entry.name, "' does not have: it belongs to ", others);
  }
}

std::string rounding_text(RoundingMode mode) {
  const auto table = config_table();
  const auto field = std::find_if(table.begin(), table.end(),
                                  [](const ConfigField& row) { return row.name == "rounding"; });
  return config_text(*field, static_cast<int64_t>(mode));
}

void check_rounding(const CodecEntry& entry, const cgx_config_t& config) {
  if (config.rounding == CGX_CODECS_OWN) return;
  const auto rounding = static_cast<RoundingMode>(config.rounding);
  const auto& served = entry.roundings;
  if (std::find(served.begin(), served.end(), rounding) != served.end()) return;
  std::string accepted;
  for (const RoundingMode mode : served)
    accepted += join(accepted.empty() ? "" : ", ", rounding_text(mode));
  fail(CGX_INVALID_ARGUMENT, "rounding is ", rounding_text(rounding), "; compressor='", entry.name,
       "' rounds ", accepted, ": give that, or None");
}

}  // namespace

const std::vector<CodecEntry>& codec_table() { return table(); }

void add_codec(const CodecEntry& entry) { table().insert(table().begin(), entry); }

const CodecEntry& codec_entry(const CodecSettings& settings) {
  require(settings.bucket_size >= 1, CGX_INVALID_ARGUMENT, "bucket_size=", settings.bucket_size,
          ": give at least 1");
  for (const CodecEntry& entry : codec_table()) {
    if (!entry.serves(settings)) continue;
    if (settings.bits != kExactBits && entry.highest_bits != 0 && !has_bits(entry, settings.bits))
      break;
    return entry;
  }
  fail(CGX_INVALID_ARGUMENT, "bits=", settings.bits, ": give 1 to 8, or 32 for exact values");
}

std::unique_ptr<Codec> make_codec(const CodecSettings& settings) {
  const CodecEntry& entry = codec_entry(settings);
  auto codec = entry.make(settings);
  if (settings.bits == kExactBits) return codec;
  if (settings.rotation != 0) codec = make_rotated(std::move(codec), settings.rotation);
  if (settings.skip_incomplete_buckets && codec->sliced() && codec->sliced()->grain() > 1)
    codec = make_whole_buckets(std::move(codec), make_none(settings), settings.bucket_size);
  return codec;
}

CodecSettings settings_of(const cgx_config_t& config, Dtype dtype) {
  CodecSettings settings;
  settings.dtype = dtype;
  settings.bits = static_cast<int>(config.bits);
  settings.bucket_size = config.bucket_size;
  settings.skip_incomplete_buckets = config.skip_incomplete_buckets != 0;
  settings.compressor = static_cast<cgx_compressor_t>(config.compressor);
  settings.density = config.density != 0 ? config.density : kHundredth;
  settings.value_bits = config.value_bits != 0 ? static_cast<int>(config.value_bits) : kExactBits;
  settings.rotation = static_cast<int>(config.rotation);
  settings.clip = config.clip != 0;
  return settings;
}

RoundingMode rounding_of(const cgx_config_t& config) {
  if (config.rounding != CGX_CODECS_OWN) return static_cast<RoundingMode>(config.rounding);
  return compressor_entry(config.compressor).roundings.front();
}

void check_compressor(const cgx_config_t& config) {
  const CodecEntry& entry = compressor_entry(config.compressor);
  if (entry.highest_bits != 0) check_bits(entry, "bits", config.bits);
  check_bits(entry, "gather_bits", config.gather_bits);
  check_bits(entry, "intra_bits", config.intra_bits);
  check_rounding(entry, config);
  check_knobs(entry, config);
  require(
      config.compressor != CGX_SIGN || (config.gather_bits == 0 && config.intra_bits == 0 &&
                                        config.skip_incomplete_buckets == 0),
      CGX_INVALID_ARGUMENT,
      "gather_bits, intra_bits or skip_incomplete_buckets are given with compressor='sign': all "
      "values of a vote are signs, both ways: leave them out");
}

void check_feedback(const CodecSettings& settings) {
  const CodecEntry& entry = codec_entry(settings);
  const std::string why = entry.no_feedback ? entry.no_feedback(settings) : "";
  require(why.empty(), CGX_INVALID_ARGUMENT, "error feedback does not converge with compressor='",
          entry.name, "': ", why);
}

std::string describe_compressors() {
  const auto quoted = [](const auto& words, const auto& text_of) {
    std::string list;
    for (const auto& word : words) list += join(list.empty() ? "\"" : ", \"", text_of(word), "\"");
    return list;
  };
  std::string rows;
  for (const CodecEntry& entry : table()) {
    if (entry.device_runs == none_runs) continue;  // exact values are no compressor
    rows +=
        join(rows.empty() ? "" : ", ", "{\"name\": \"", entry.name, "\", \"description\": \"",
             entry.description, "\", \"sliced\": ", entry.sliced ? "true" : "false",
             ", \"bits\": [", entry.lowest_bits, ", ", entry.highest_bits, "], \"roundings\": [",
             quoted(entry.roundings,
                    [](RoundingMode mode) {
                      const std::string text = rounding_text(mode);
                      return text.substr(1, text.size() - 2);
                    }),
             "], \"knobs\": [", quoted(entry.knobs, [](std::string_view name) { return name; }),
             "], \"biased\": ", entry.biased ? "true" : "false", ", \"device\": \"", entry.why_not,
             "\"}");
  }
  return "[" + rows + "]";
}

std::vector<DeviceRun> device_runs(const CodecSettings& settings, int64_t numel) {
  const CodecEntry& entry = codec_entry(settings);
  require(entry.device_runs, CGX_UNSUPPORTED, "the codec ", entry.name,
          " is not there for devices: ", entry.why_not);
  require(settings.rotation == 0, CGX_UNSUPPORTED,
          "rotation is not there for devices: ", kNotOnDevices);
  return numel > 0 ? entry.device_runs(settings, numel) : std::vector<DeviceRun>();
}

}  // namespace cgx
