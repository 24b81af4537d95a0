// The fields of cgx_config_t: accepted values, defaults, and text format. Bindings read them
// through cgx.h, section 4.
//
//   1. the table: a row for each field
//   2. checks: each field against its row, and compressor-specific fields against the compressor
//   3. texts: one field, or all of them: "bits=4 rounding='nearest' gather_bits=None"
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "cgx/config.h"

namespace cgx {

// A named value. Texts write names as Python does: 'nearest', None, True.
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
  std::span<const ConfigRange> ranges = {};  // of values written as numbers
  const char* accepted;                      // words and ranges, for errors
  const char* documentation;                 // one line
  bool of_compressor = false;                // specific to a compressor: reset if the compressor
                                             // changes
  int64_t unit = 1;  // the number that is written as 1; if not 1, values are decimals
};

// The number of leading fields that ranks must agree on. Messages do not depend on the others.
inline constexpr size_t kAgreedFields = offsetof(cgx_config_t, error_feedback) / sizeof(int64_t);
using AgreedConfig = std::array<int64_t, kAgreedFields>;

// In the order of cgx_config_t.
std::span<const ConfigField> config_table();

// Throws Error(CGX_INVALID_ARGUMENT), which names the first agreed field that is out of range or
// that the compressor does not support.
void check_config(const cgx_config_t& config);

// Formats one field. The number may be invalid, because a peer may have sent it.
std::string config_text(const ConfigField& field, int64_t number);
// The same, without quotes.
std::string config_name(const ConfigField& field, int64_t number);

// Fields that the text does not set have their defaults. Throws Error(CGX_INVALID_ARGUMENT).
cgx_config_t parse_config(std::string_view text);
// Returns the config with the fields that the text sets. See cgx_config_override.
cgx_config_t override_config(const cgx_config_t& config, std::string_view text);

// The table as JSON: see cgx_config_fields.
std::string describe_config();
// "unknown" if the number is not a compressor.
const char* compressor_name(int64_t compressor);

}  // namespace cgx
