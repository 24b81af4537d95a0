#include "config.h"

#include <algorithm>
#include <charconv>
#include <iterator>

#include "api.h"
#include "base/status.h"

namespace cgx {
namespace {

// ---- 1. the table ----------------------------------------------------------------------------

constexpr ConfigWord kRoundings[] = {
    {"'nearest'", CGX_NEAREST}, {"'stochastic'", CGX_STOCHASTIC}, {"'shift'", CGX_SHIFT}};
constexpr ConfigWord kAlgorithms[] = {
    {"'auto'", CGX_AUTO}, {"'one_shot'", CGX_ONE_SHOT},         {"'sra'", CGX_SRA},
    {"'ring'", CGX_RING}, {"'hierarchical'", CGX_HIERARCHICAL}, {"'by_hosts'", CGX_BY_HOSTS}};
constexpr ConfigWord kNone[] = {{"None", 0}};
constexpr ConfigWord kFlags[] = {{"False", 0}, {"True", 1}};
constexpr ConfigRange kBits[] = {{1, 8}, {32, 32}};
constexpr ConfigRange kPositive[] = {{1, INT64_MAX}};
constexpr ConfigRange kNotNegative[] = {{0, INT64_MAX}};

constexpr ConfigField kTable[] = {
    {"bits", &cgx_config_t::bits, 4, {}, kBits, "an integer from 1 to 8, or 32 (exact)"},
    {"bucket_size", &cgx_config_t::bucket_size, 512, {}, kPositive, "an integer, at least 1"},
    {"rounding",
     &cgx_config_t::rounding,
     CGX_STOCHASTIC,
     kRoundings,
     {},
     "one of 'nearest', 'stochastic', 'shift'"},
    {"algorithm",
     &cgx_config_t::algorithm,
     CGX_AUTO,
     kAlgorithms,
     {},
     "one of 'auto', 'one_shot', 'sra', 'ring', 'hierarchical', 'by_hosts'"},
    {"gather_bits", &cgx_config_t::gather_bits, 0, kNone, kBits,
     "None (as bits), an integer from 1 to 8, or 32 (exact)"},
    {"intra_bits", &cgx_config_t::intra_bits, 0, kNone, kBits,
     "None or 32 (exact), or an integer from 1 to 8"},
    {"skip_incomplete_buckets",
     &cgx_config_t::skip_incomplete_buckets,
     0,
     kFlags,
     {},
     "True or False"},
    {"minimal_size", &cgx_config_t::minimal_size, 0, {}, kNotNegative, "an integer, at least 0"},
};
static_assert(std::size(kTable) * sizeof(int64_t) == sizeof(cgx_config_t), "a field has no row");

const ConfigWord* word_of(const ConfigField& field, int64_t number) {
  for (const ConfigWord& word : field.words)
    if (word.number == number) return &word;
  return nullptr;
}

bool in_ranges(const ConfigField& field, int64_t number) {
  return std::any_of(field.ranges.begin(), field.ranges.end(), [&](const ConfigRange& range) {
    return number >= range.lowest && number <= range.highest;
  });
}

// ---- 3. texts: the way back ------------------------------------------------------------------

[[noreturn]] void refuse(const ConfigField& field, std::string_view text) {
  fail(CGX_INVALID_ARGUMENT, field.name, " is ", text, "; it must be ", field.accepted);
}

int64_t parse_value(const ConfigField& field, std::string_view text) {
  for (const ConfigWord& word : field.words)
    if (word.text == text) return word.number;
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size() || !in_ranges(field, number))
    refuse(field, text);
  return number;
}

// Its place in the table. Texts usually have the table's order: `expected` is looked at first.
size_t find_field(std::string_view name, size_t expected) {
  for (size_t i = 0; i < std::size(kTable); ++i) {
    const size_t at = (expected + i) % std::size(kTable);
    if (kTable[at].name == name) return at;
  }
  std::string known;
  for (const ConfigField& field : kTable) known += join(known.empty() ? "" : ", ", field.name);
  fail(CGX_INVALID_ARGUMENT, "a config has no '", name, "'; it has ", known);
}

// Takes what is before the next `end` off the text, and that.
std::string_view take(std::string_view* text, char end) {
  const size_t at = std::min(text->find(end), text->size());
  const std::string_view taken = text->substr(0, at);
  text->remove_prefix(std::min(at + 1, text->size()));
  return taken;
}

// [{"name": "bits", "default": "4", "accepted": "an integer ...", "words": {}}, ...]
std::string describe_table() {
  std::string rows;
  for (const ConfigField& field : kTable) {
    std::string words;
    for (const ConfigWord& word : field.words)
      words += join(words.empty() ? "\"" : ", \"", word.text, "\": ", word.number);
    rows += join(rows.empty() ? "" : ", ", "{\"name\": \"", field.name, "\", \"default\": \"",
                 config_text(field, field.by_default), "\", \"accepted\": \"", field.accepted,
                 "\", \"words\": {", words, "}}");
  }
  return "[" + rows + "]";
}

}  // namespace

std::span<const ConfigField> config_table() { return kTable; }

void check_config(const cgx_config_t& config) {
  for (const ConfigField& field : kTable) {
    const int64_t number = config.*field.value;
    if (!word_of(field, number) && !in_ranges(field, number)) [[unlikely]]
      refuse(field, std::to_string(number));
  }
}

std::string config_text(const ConfigField& field, int64_t number) {
  const ConfigWord* const word = word_of(field, number);
  return word ? std::string(word->text) : std::to_string(number);
}

cgx_config_t parse_config(std::string_view text) {
  cgx_config_t config;
  for (const ConfigField& field : kTable) config.*field.value = field.by_default;
  bool given[std::size(kTable)] = {};
  for (size_t next = 0; !text.empty();) {
    const std::string_view name = take(&text, '=');
    const size_t at = find_field(name, next);
    require(!given[at], CGX_INVALID_ARGUMENT, name, " is given twice");
    given[at] = true;
    config.*kTable[at].value = parse_value(kTable[at], take(&text, ' '));
    next = at + 1;
  }
  return config;
}

}  // namespace cgx

// ---- The functions of cgx.h -------------------------------------------------------------------

const char* cgx_config_fields(void) {
  static const std::string text = cgx::describe_table();
  return text.c_str();
}

cgx_status_t cgx_config_parse(const char* text, cgx_config_t* config) {
  return cgx::guarded_arithmetic([&] { *config = cgx::parse_config(text ? text : ""); });
}
