// Codecs that wrap other codecs.
#pragma once

#include <memory>

#include "compressor/codec.h"

namespace cgx {

// skip_incomplete_buckets: `inner`, of fixed length, encodes full buckets, and `none` the rest at
// the end of a segment.
std::unique_ptr<Codec> make_whole_buckets(std::unique_ptr<Codec> inner, std::unique_ptr<Codec> none,
                                          int64_t bucket_size);

// rotation: rotates values before `inner`, of fixed length, encodes them, and back after it decodes
// them.
std::unique_ptr<Codec> make_rotated(std::unique_ptr<Codec> inner, int rotation);

// Encodes any number of grains with `inner`, which has no fixed length.
std::unique_ptr<Codec> make_framed(std::unique_ptr<Codec> inner);

}  // namespace cgx
