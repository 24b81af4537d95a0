// Values in 16 bits: bf16, or fp16 where the tensor is.
#pragma once

#include <memory>

#include "compressor/codec.h"

namespace cgx {

std::unique_ptr<Codec> make_half(const CodecSettings& settings);

}  // namespace cgx
