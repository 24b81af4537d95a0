// Exact values: the wire carries them in the settings' dtype.
#pragma once

#include <memory>

#include "compressor/compressor.h"

namespace cgx {

std::unique_ptr<Compressor> make_none(const CompressorSettings& settings);

}  // namespace cgx
