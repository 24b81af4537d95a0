// Values as they are, in another dtype: exact (none), in the settings'; or in 16 bits (half), bf16
// or fp16 where the tensor is.
#pragma once

#include <memory>

#include "compressor/codec.h"

namespace cgx {

std::unique_ptr<Codec> make_none(const CodecSettings& settings);
std::unique_ptr<Codec> make_half(const CodecSettings& settings);

}  // namespace cgx
