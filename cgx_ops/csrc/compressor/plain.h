// Values as they are, in another dtype: exact (none), in the settings'; or in 16 bits (half), bf16
// or fp16 where the tensor is.
#pragma once

#include <memory>
#include <vector>

#include "compressor/codec.h"

namespace cgx {

std::unique_ptr<Codec> make_none(const CodecSettings& settings);
std::unique_ptr<Codec> make_half(const CodecSettings& settings);
std::vector<DeviceRun> none_runs(const CodecSettings& settings, int64_t numel);

}  // namespace cgx
