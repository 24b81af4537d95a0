// What a config says of its codec, and what of it belongs to the compressor: by the codecs' table.
#pragma once

#include <string>

#include "base/types.h"
#include "cgx/config.h"
#include "compressor/codec.h"
#include "compressor/ways.h"

namespace cgx {

// Of a config that was checked: how each value is encoded, and how its compressor rounds.
CodecSettings settings_of(const cgx_config_t& config, Dtype dtype);
// The same on each way, of settings that follow from the config: exact values are so on all.
ByWay<CodecSettings> settings_by_way(const cgx_config_t& config, const CodecSettings& settings);
RoundingMode rounding_of(const cgx_config_t& config);
// Throws Error(CGX_INVALID_ARGUMENT) where a field does not belong to the compressor.
void check_compressor(const cgx_config_t& config);
// Throws Error(CGX_INVALID_ARGUMENT) if error feedback does not converge with the config.
void require_feedback(const cgx_config_t& config);
// The codecs' table as JSON: cgx_compressors().
std::string describe_compressors();

}  // namespace cgx
