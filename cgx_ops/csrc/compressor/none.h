// Exact values: the wire carries the tensor's own dtype.
#pragma once

#include <memory>

#include "compressor/compressor.h"

namespace cgx {

std::unique_ptr<Compressor> make_none(const CompressorSettings& settings);

}  // namespace cgx
