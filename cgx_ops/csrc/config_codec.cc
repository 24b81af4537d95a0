#include "config_codec.h"

#include <algorithm>
#include <string>

#include "base/status.h"
#include "config.h"

namespace cgx {
namespace {

constexpr int64_t kHundredth = 10000000;  // the default density, in billionths
constexpr int64_t kTwo = 2000000000;      // the default rate, in billionths

// The error text is, for instance, "bits is 7; with compressor='levels' it must be from 1 to 4, or
// 32 (exact)".
void check_bits(const CodecEntry& entry, std::string_view name, int64_t bits) {
  if (bits == 0 || bits == kExactBits || entry.has_bits(bits)) return;
  if (entry.highest_bits == 0)
    fail(CGX_INVALID_ARGUMENT, name, " is ", bits, "; compressor='", entry.name,
         "' has a fixed width: leave ", name, " out, or use 32 (exact)");
  fail(CGX_INVALID_ARGUMENT, name, " is ", bits, "; with compressor='", entry.name,
       "' it must be from ", entry.lowest_bits, " to ", entry.highest_bits, ", or 32 (exact)");
}

bool has(const CodecEntry& entry, const ConfigField& field) {
  return std::find(entry.knobs.begin(), entry.knobs.end(), field.name) != entry.knobs.end();
}

// Checks optional fields, for which 0 means that they are not set.
void check_knobs(const CodecEntry& entry, const cgx_config_t& config) {
  for (const ConfigField& field : config_table()) {
    const int64_t number = config.*field.value;
    if (number == 0 || !field.of_compressor || has(entry, field)) continue;
    std::string others;
    for (const CodecEntry& other : codec_table())
      if (has(other, field)) others += join(others.empty() ? "" : ", ", other.name);
    if (others.empty()) continue;  // all compressors support it
    fail(CGX_INVALID_ARGUMENT, field.name, " is ", config_text(field, number),
         ", which compressor='", entry.name, "' does not support: it belongs to ", others);
  }
}

const ConfigField& field_of(std::string_view name) {
  const auto table = config_table();
  return *std::find_if(table.begin(), table.end(),
                       [&](const ConfigField& row) { return row.name == name; });
}

std::string rounding_text(RoundingMode mode) {
  return config_text(field_of("rounding"), static_cast<int64_t>(mode));
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
       "' supports ", accepted, ": give that, or None");
}

}  // namespace

CodecSettings settings_of(const cgx_config_t& config, Dtype dtype) {
  CodecSettings settings;
  settings.dtype = dtype;
  settings.bits = static_cast<int>(config.bits);
  const int64_t fixed = compressor_entry(config.compressor).bucket_size;
  settings.bucket_size = fixed != 0 ? fixed : config.bucket_size;
  settings.skip_incomplete_buckets = config.skip_incomplete_buckets != 0;
  settings.compressor = static_cast<cgx_compressor_t>(config.compressor);
  settings.density = config.density != 0 ? config.density : kHundredth;
  settings.value_bits = config.value_bits != 0 ? static_cast<int>(config.value_bits) : kExactBits;
  settings.rotation = static_cast<int>(config.rotation);
  settings.rate = config.rate != 0 ? config.rate : kTwo;
  settings.clip = config.clip != 0;
  return settings;
}

PerStage<CodecSettings> settings_per_stage(const cgx_config_t& config,
                                           const CodecSettings& settings) {
  PerStage<CodecSettings> stages;
  stages.each.fill(settings);
  if (settings.bits == kExactBits) return stages;
  if (config.compressor != CGX_SIGN)
    stages[Stage::kIntra].bits =
        config.intra_bits != 0 ? static_cast<int>(config.intra_bits) : kExactBits;
  if (config.gather_bits != 0) stages[Stage::kGather].bits = static_cast<int>(config.gather_bits);
  return stages;
}

RoundingMode rounding_of(const cgx_config_t& config) {
  if (config.rounding != CGX_CODECS_OWN) return static_cast<RoundingMode>(config.rounding);
  return compressor_entry(config.compressor).roundings.front();
}

void check_compressor(const cgx_config_t& config) {
  const CodecEntry& entry = compressor_entry(config.compressor);
  // If the width is fixed, the default is ignored, since it is indistinguishable from bits that
  // were not given.
  if (entry.highest_bits != 0 || config.bits != field_of("bits").by_default)
    check_bits(entry, "bits", config.bits);
  check_bits(entry, "gather_bits", config.gather_bits);
  check_bits(entry, "intra_bits", config.intra_bits);
  check_rounding(entry, config);
  check_knobs(entry, config);
  require(config.compressor != CGX_SIGN || (config.gather_bits == 0 && config.intra_bits == 0 &&
                                            config.skip_incomplete_buckets == 0),
          CGX_INVALID_ARGUMENT,
          "gather_bits, intra_bits or skip_incomplete_buckets are given with compressor='sign', "
          "which sends signs in both stages: leave them out");
}

void require_feedback(const cgx_config_t& config) {
  require(config.bits != kExactBits, CGX_INVALID_ARGUMENT,
          "error feedback with bits=32: there is no quantization error; leave it out, or use fewer "
          "bits");
  const CodecEntry& entry = compressor_entry(config.compressor);
  require(!entry.exact, CGX_INVALID_ARGUMENT, "error feedback with compressor='", entry.name,
          "': there is no quantization error; leave it out, or use another compressor");
  check_feedback(settings_per_stage(config, settings_of(config, Dtype::kFloat32)).each,
                 rounding_of(config));
}

std::string describe_compressors() {
  const auto quoted = [](const auto& words, const auto& text_of) {
    std::string list;
    for (const auto& word : words) list += join(list.empty() ? "\"" : ", \"", text_of(word), "\"");
    return list;
  };
  std::string rows;
  for (const CodecEntry& entry : codec_table()) {
    if (entry.serves({.bits = kExactBits})) continue;  // uncompressed values are not a compressor
    rows +=
        join(rows.empty() ? "" : ", ", "{\"name\": \"", entry.name, "\", \"description\": \"",
             entry.description, "\", \"fixed_length\": ", entry.fixed_length ? "true" : "false",
             ", \"bits\": [", entry.lowest_bits, ", ", entry.highest_bits, "], \"roundings\": [",
             quoted(entry.roundings,
                    [](RoundingMode mode) {
                      return config_name(field_of("rounding"), static_cast<int64_t>(mode));
                    }),
             "], \"knobs\": [", quoted(entry.knobs, [](std::string_view name) { return name; }),
             "], \"exact\": ", entry.exact ? "true" : "false",
             ", \"biased\": ", entry.biased ? "true" : "false", ", \"device\": \"", entry.why_not,
             "\"}");
  }
  return "[" + rows + "]";
}

}  // namespace cgx
