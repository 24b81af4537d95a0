// Codecs that only convert the dtype: uncompressed (none), or 16 bits (half): fp16 for fp16
// tensors, bf16 for others.
#pragma once

#include <memory>

#include "compressor/codec.h"

namespace cgx {

std::unique_ptr<Codec> make_none(const CodecSettings& settings);
std::unique_ptr<Codec> make_half(const CodecSettings& settings);

}  // namespace cgx
