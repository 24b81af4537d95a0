// Derives the codec settings of a config, and checks its compressor-specific fields against the
// table of codecs.
#pragma once

#include <string>

#include "base/types.h"
#include "cgx/config.h"
#include "compressor/codec.h"
#include "compressor/stage.h"

namespace cgx {

// Returns the encoder settings of a checked config, and its rounding.
CodecSettings settings_of(const cgx_config_t& config, Dtype dtype);
// Returns the settings per stage. Uncompressed values are uncompressed in all stages.
PerStage<CodecSettings> settings_per_stage(const cgx_config_t& config,
                                           const CodecSettings& settings);
RoundingMode rounding_of(const cgx_config_t& config);
// Throws Error(CGX_INVALID_ARGUMENT) if the compressor does not support a field.
void check_compressor(const cgx_config_t& config);
// Throws Error(CGX_INVALID_ARGUMENT) if error feedback does not converge with the config.
void require_feedback(const cgx_config_t& config);
// The table of codecs as JSON: see cgx_compressors().
std::string describe_compressors();

}  // namespace cgx
