#include "config.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <vector>

#include "base/status.h"
#include "config_codec.h"

namespace cgx {
namespace {

// ---- 1. the table ----------------------------------------------------------------------------

constexpr ConfigWord kRoundings[] = {{"nearest", CGX_NEAREST},
                                     {"stochastic", CGX_STOCHASTIC},
                                     {"shift", CGX_SHIFT},
                                     {"None", CGX_CODECS_OWN, false}};
constexpr ConfigWord kCompressors[] = {{"uniform", CGX_UNIFORM},
                                       {"levels", CGX_LEVELS},
                                       {"sign", CGX_SIGN},
                                       {"onebit", CGX_ONEBIT},
                                       {"ternary", CGX_TERNARY},
                                       {"qsgd", CGX_QSGD},
                                       {"half", CGX_HALF},
                                       {"topk", CGX_TOPK},
                                       {"randk", CGX_RANDK},
                                       {"entropy", CGX_ENTROPY},
                                       {"lossless", CGX_LOSSLESS},
                                       {"mxfp8", CGX_MXFP8},
                                       {"mxfp8_e5m2", CGX_MXFP8_E5M2},
                                       {"mxfp4", CGX_MXFP4},
                                       {"nvfp4", CGX_NVFP4}};
constexpr ConfigWord kAlgorithms[] = {
    {"auto", CGX_AUTO}, {"one_shot", CGX_ONE_SHOT},         {"sra", CGX_SRA},
    {"ring", CGX_RING}, {"hierarchical", CGX_HIERARCHICAL}, {"by_hosts", CGX_BY_HOSTS}};
constexpr ConfigWord kWhole[] = {{"1.0", 0, false}};
constexpr ConfigWord kNone[] = {{"None", 0, false}};
constexpr ConfigWord kFlags[] = {{"False", 0, false}, {"True", 1, false}};
constexpr ConfigWord kFeedback[] = {{"None", CGX_FEEDBACK_IF_BIASED, false},
                                    {"False", CGX_FEEDBACK_OFF, false},
                                    {"True", CGX_FEEDBACK_ON, false}};
constexpr ConfigRange kBits[] = {{1, 8}, {32, 32}};
constexpr ConfigRange kValueBits[] = {{1, 8}, {16, 16}, {32, 32}};
constexpr ConfigRange kPowersOfTwo[] = {{2, 2},   {4, 4},     {8, 8},     {16, 16},   {32, 32},
                                        {64, 64}, {128, 128}, {256, 256}, {512, 512}, {1024, 1024}};
constexpr int64_t kBillionths = 1000000000;
constexpr ConfigRange kShares[] = {{1, kBillionths}};
constexpr ConfigRange kRates[] = {{kBillionths / 4, 8 * kBillionths}};
constexpr ConfigRange kPositive[] = {{1, INT64_MAX}};
constexpr ConfigRange kNotNegative[] = {{0, INT64_MAX}};

constexpr ConfigField kTable[] = {
    {.name = "bits",
     .value = &cgx_config_t::bits,
     .by_default = 4,
     .ranges = kBits,
     .accepted = "an integer from 1 to 8, or 32 (exact)",
     .documentation = "bits per value; 32 sends all values exact, with any compressor",
     .of_compressor = true},
    {.name = "bucket_size",
     .value = &cgx_config_t::bucket_size,
     .by_default = 512,
     .ranges = kPositive,
     .accepted = "an integer, at least 1",
     .documentation = "elements that share one scale, or one selection of the largest"},
    {.name = "rounding",
     .value = &cgx_config_t::rounding,
     .by_default = CGX_CODECS_OWN,
     .words = kRoundings,
     .accepted = "one of 'nearest', 'stochastic', 'shift', or None (the compressor's own)",
     .documentation = "'stochastic' and 'shift' are unbiased; 'nearest' has the least error",
     .of_compressor = true},
    {.name = "algorithm",
     .value = &cgx_config_t::algorithm,
     .by_default = CGX_AUTO,
     .words = kAlgorithms,
     .accepted = "one of 'auto', 'one_shot', 'sra', 'ring', 'hierarchical', 'by_hosts'",
     .documentation =
         "of an allreduce, reduce_scatter or all_gather; 'auto' chooses by size and hosts, "
         "'by_hosts' by hosts only"},
    {.name = "gather_bits",
     .value = &cgx_config_t::gather_bits,
     .words = kNone,
     .ranges = kBits,
     .accepted = "None (the same as bits), an integer from 1 to 8, or 32 (exact)",
     .documentation = "bits of the reduced values in the gather stage",
     .of_compressor = true},
    {.name = "intra_bits",
     .value = &cgx_config_t::intra_bits,
     .words = kNone,
     .ranges = kBits,
     .accepted = "None or 32 (exact), or an integer from 1 to 8",
     .documentation = "hierarchical: bits of values that are summed on their own host",
     .of_compressor = true},
    {.name = "skip_incomplete_buckets",
     .value = &cgx_config_t::skip_incomplete_buckets,
     .words = kFlags,
     .accepted = "True or False",
     .documentation = "whether a last bucket that is not full is sent exact"},
    {.name = "minimal_size",
     .value = &cgx_config_t::minimal_size,
     .ranges = kNotNegative,
     .accepted = "an integer, at least 0",
     .documentation = "tensors of fewer than max(16, minimal_size) elements are sent exact"},
    {.name = "compressor",
     .value = &cgx_config_t::compressor,
     .by_default = CGX_UNIFORM,
     .words = kCompressors,
     .accepted = "one of 'uniform', 'levels', 'sign', 'onebit', 'ternary', 'qsgd', 'half', 'topk', "
                 "'randk', 'entropy', 'lossless', 'mxfp8', 'mxfp8_e5m2', 'mxfp4', 'nvfp4'",
     .documentation = "how values are encoded"},
    {.name = "density",
     .value = &cgx_config_t::density,
     .words = kNone,
     .ranges = kShares,
     .accepted = "None (0.01), or more than 0 and at most 1",
     .documentation = "topk, randk: the share of values to send",
     .of_compressor = true,
     .unit = kBillionths},
    {.name = "value_bits",
     .value = &cgx_config_t::value_bits,
     .words = kNone,
     .ranges = kValueBits,
     .accepted = "None or 32 (exact), 16, or an integer from 1 to 8",
     .documentation = "topk: bits of each value sent",
     .of_compressor = true},
    {.name = "rotation",
     .value = &cgx_config_t::rotation,
     .words = kNone,
     .ranges = kPowersOfTwo,
     .accepted = "None, or a power of two from 2 to 1024",
     .documentation = "number of values that a Hadamard matrix rotates together before encoding",
     .of_compressor = true},
    {.name = "rate",
     .value = &cgx_config_t::rate,
     .words = kNone,
     .ranges = kRates,
     .accepted = "None (2.0), or from 0.25 to 8",
     .documentation = "entropy: mean bits per value, headers included",
     .of_compressor = true,
     .unit = kBillionths},
    {.name = "clip",
     .value = &cgx_config_t::clip,
     .words = kFlags,
     .accepted = "True or False",
     .documentation = "ternary: clip values at 2.5 times their bucket's root mean square",
     .of_compressor = true},
    {.name = "error_feedback",
     .value = &cgx_config_t::error_feedback,
     .by_default = CGX_FEEDBACK_IF_BIASED,
     .words = kFeedback,
     .accepted = "True, False or None (True if the compressor is biased)",
     .documentation = "training steps: add the quantization error to the next step's values"},
    {.name = "residual_decay",
     .value = &cgx_config_t::residual_decay,
     .words = kWhole,
     .ranges = kShares,
     .accepted = "more than 0 and at most 1",
     .documentation = "with error feedback: the fraction of the residual that is added",
     .unit = kBillionths},
};
static_assert(std::size(kTable) * sizeof(int64_t) == sizeof(cgx_config_t), "a field has no row");

const ConfigWord* word_of(const ConfigField& field, int64_t number) {
  for (const ConfigWord& word : field.words)
    if (word.number == number) return &word;
  return nullptr;
}

std::string text_of(const ConfigWord& word) {
  return word.quoted ? join("'", word.name, "'") : word.name;
}

bool is_written(const ConfigWord& word, std::string_view text) {
  if (!word.quoted) return text == word.name;
  const bool quoted = text.size() > 1 && text.front() == '\'' && text.back() == '\'';
  return quoted && text.substr(1, text.size() - 2) == word.name;
}

std::string number_text(const ConfigField& field, int64_t number) {
  if (field.unit == 1) return std::to_string(number);
  char digits[32];
  const double units = static_cast<double>(number) / static_cast<double>(field.unit);
  return {digits, std::to_chars(digits, digits + sizeof(digits), units).ptr};
}

bool in_ranges(const ConfigField& field, int64_t number) {
  return std::any_of(field.ranges.begin(), field.ranges.end(), [&](const ConfigRange& range) {
    return number >= range.lowest && number <= range.highest;
  });
}

// ---- 3. parsing ------------------------------------------------------------------------------

[[noreturn]] void refuse(const ConfigField& field, std::string_view text) {
  const auto place = static_cast<int32_t>(&field - std::begin(kTable));
  throw Error(CGX_INVALID_ARGUMENT, join(field.name, " is ", text, "; it must be ", field.accepted),
              place);
}

int64_t parse_value(const ConfigField& field, std::string_view text) {
  for (const ConfigWord& word : field.words)
    if (is_written(word, text)) return word.number;
  const char* const last = text.data() + text.size();
  int64_t number = 0;
  auto [end, error] = std::from_chars(text.data(), last, number);
  if (field.unit != 1) {
    double units = 0;
    const auto parsed = std::from_chars(text.data(), last, units);
    end = parsed.ptr;
    error = parsed.ec;
    // 0 is out of all ranges, and stands for values that are, such as NaN. Positive values below
    // one unit are rounded up.
    const double scaled = units * static_cast<double>(field.unit);
    const bool fits = scaled > 0 && scaled <= static_cast<double>(field.ranges.back().highest);
    number = fits ? std::max(1LL, std::llround(scaled)) : 0;
  }
  if (error != std::errc{} || end != last || !in_ranges(field, number)) refuse(field, text);
  return number;
}

// Returns the index of a field. Texts usually follow the table's order, so try `expected` first.
size_t find_field(std::string_view name, size_t expected) {
  for (size_t i = 0; i < std::size(kTable); ++i) {
    const size_t at = (expected + i) % std::size(kTable);
    if (kTable[at].name == name) return at;
  }
  std::string known;
  for (const ConfigField& field : kTable) known += join(known.empty() ? "" : ", ", field.name);
  fail(CGX_INVALID_ARGUMENT, "a config has no field '", name, "'; the fields are ", known);
}

// Removes the text up to the next `end`, and that character, and returns the text.
std::string_view take(std::string_view* text, char end) {
  const size_t at = std::min(text->find(end), text->size());
  const std::string_view taken = text->substr(0, at);
  text->remove_prefix(std::min(at + 1, text->size()));
  return taken;
}

struct Given {
  const ConfigField* field;
  int64_t number;
};

std::vector<Given> parse_fields(std::string_view text) {
  std::vector<Given> fields;
  fields.reserve(std::size(kTable));
  bool given[std::size(kTable)] = {};
  for (size_t next = 0; !text.empty();) {
    const std::string_view name = take(&text, '=');
    const size_t at = find_field(name, next);
    require(!given[at], CGX_INVALID_ARGUMENT, name, " is given twice");
    given[at] = true;
    fields.push_back({&kTable[at], parse_value(kTable[at], take(&text, ' '))});
    next = at + 1;
  }
  return fields;
}

cgx_config_t checked(const cgx_config_t& config) {
  check_compressor(config);
  if (config.error_feedback == CGX_FEEDBACK_ON) require_feedback(config);
  return config;
}

}  // namespace

std::span<const ConfigField> config_table() { return kTable; }

void check_config(const cgx_config_t& config) {
  for (const ConfigField& field : config_table().first(kAgreedFields)) {
    const int64_t number = config.*field.value;
    if (!word_of(field, number) && !in_ranges(field, number)) [[unlikely]]
      refuse(field, config_text(field, number));
  }
  check_compressor(config);
}

std::string config_text(const ConfigField& field, int64_t number) {
  const ConfigWord* const word = word_of(field, number);
  return word ? text_of(*word) : number_text(field, number);
}

std::string config_name(const ConfigField& field, int64_t number) {
  const ConfigWord* const word = word_of(field, number);
  return word ? word->name : number_text(field, number);
}

cgx_config_t parse_config(std::string_view text) {
  cgx_config_t config;
  for (const ConfigField& field : kTable) config.*field.value = field.by_default;
  for (const auto& [field, number] : parse_fields(text)) config.*field->value = number;
  return checked(config);
}

cgx_config_t override_config(const cgx_config_t& config, std::string_view text) {
  cgx_config_t own = config;
  const std::vector<Given> given = parse_fields(text);
  for (const auto& [field, number] : given) {
    if (field->value != &cgx_config_t::compressor || number == config.compressor) continue;
    for (const ConfigField& left : kTable)
      if (left.of_compressor) own.*left.value = left.by_default;
    if (config.bits == kExactBits) own.bits = kExactBits;
  }
  for (const auto& [field, number] : given) {
    own.*field->value = number;
    // Exact values have no quantization error.
    const bool exact =
        field->value == &cgx_config_t::bits
            ? number == kExactBits
            : field->value == &cgx_config_t::compressor && compressor_entry(number).exact;
    if (exact) own.error_feedback = CGX_FEEDBACK_IF_BIASED;
  }
  return checked(own);
}

std::string describe_config() {
  std::string rows;
  for (const ConfigField& field : kTable) {
    std::string words;
    for (const ConfigWord& word : field.words)
      words += join(words.empty() ? "\"" : ", \"", word.name, "\": ", word.number);
    rows += join(rows.empty() ? "" : ", ", "{\"name\": \"", field.name, "\", \"default\": \"",
                 config_text(field, field.by_default), "\", \"accepted\": \"", field.accepted,
                 "\", \"documentation\": \"", field.documentation,
                 "\", \"of_compressor\": ", field.of_compressor ? "true" : "false",
                 ", \"words\": {", words, "}}");
  }
  return "[" + rows + "]";
}

const char* compressor_name(int64_t compressor) {
  for (const ConfigWord& word : kCompressors)
    if (word.number == compressor) return word.name;
  return "unknown";
}

}  // namespace cgx
