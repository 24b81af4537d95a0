// Exact values: the wire carries them in the settings' dtype.
#pragma once

#include <memory>
#include <vector>

#include "compressor/codec.h"

namespace cgx {

std::unique_ptr<Codec> make_none(const CodecSettings& settings);
std::vector<DeviceRun> none_runs(const CodecSettings& settings, int64_t numel);

}  // namespace cgx
