// Bucketed min-max quantization to 1-8 bits: docs/wire_format.md.
#pragma once

#include <memory>

#include "compressor/compressor.h"

namespace cgx {

std::unique_ptr<Compressor> make_uniform(const CompressorSettings& settings);

}  // namespace cgx
