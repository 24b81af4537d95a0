// Exact values whose planes of bytes are entropy-coded where this saves bytes.
// docs/reference/entropy_coding.md defines the bytes.
#pragma once

#include <memory>

#include "compressor/codec.h"

namespace cgx {

std::unique_ptr<Codec> make_lossless(const CodecSettings& settings);

}  // namespace cgx
