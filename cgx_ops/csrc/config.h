// How values travel, as one value: the fields of cgx_config_t, what each accepts, its default and
// how it is written, told once. Bindings ask (cgx.h, section 4).
//
//   1. the table: a row for each field
//   2. check: every field against its row, and what belongs to a compressor against its row
//   3. texts: one field, and all of them, "bits=4 rounding='nearest' gather_bits=None"
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "cgx/config.h"

namespace cgx {

// A number that has a name. Texts spell names as in Python: 'nearest', None, True.
struct ConfigWord {
  const char* name;
  int64_t number;
  bool quoted = true;  // in texts
};

struct ConfigRange {
  int64_t lowest, highest;
};

struct ConfigField {
  std::string_view name;
  int64_t cgx_config_t::* value;
  int64_t by_default = 0;
  std::span<const ConfigWord> words = {};
  std::span<const ConfigRange> ranges = {};  // of numbers that are written as such
  const char* accepted;                      // words and ranges, for errors
  const char* documentation;                 // one line
  bool of_compressor = false;                // set for one compressor, it means nothing for another
  int64_t unit = 1;  // what is written as 1; else it is written as a decimal
};

// Ranks must agree on so many fields, the first ones: what comes after them no message needs.
inline constexpr size_t kAgreedFields = offsetof(cgx_config_t, error_feedback) / sizeof(int64_t);
using AgreedConfig = std::array<int64_t, kAgreedFields>;

// In the order of cgx_config_t.
std::span<const ConfigField> config_table();

// Throws Error(CGX_INVALID_ARGUMENT) that names the first agreed field that is out of its range, or
// that does not belong to the compressor.
void check_config(const cgx_config_t& config);

// One field, as the text form has it. A peer's number may be one that no row accepts.
std::string config_text(const ConfigField& field, int64_t number);
// The same, without quotes.
std::string config_name(const ConfigField& field, int64_t number);

// What the text leaves out has its default. Throws Error(CGX_INVALID_ARGUMENT).
cgx_config_t parse_config(std::string_view text);
// The config with the fields that the text gives. See cgx_config_override.
cgx_config_t override_config(const cgx_config_t& config, std::string_view text);

// The table as JSON: see cgx_config_fields.
std::string describe_config();
// "unknown" for a number that is no compressor.
const char* compressor_name(int64_t compressor);

}  // namespace cgx
