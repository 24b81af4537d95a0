// Bucketed min-max quantization to 1-8 bits: docs/wire_format.md.
#pragma once

#include <memory>
#include <vector>

#include "compressor/codec.h"

namespace cgx {

std::unique_ptr<Codec> make_uniform(const CodecSettings& settings);
std::vector<DeviceRun> uniform_runs(const CodecSettings& settings, int64_t numel);

}  // namespace cgx
