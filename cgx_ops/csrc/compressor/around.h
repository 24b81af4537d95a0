// Codecs around other ones, each of which can be cut.
#pragma once

#include <memory>

#include "compressor/codec.h"

namespace cgx {

// skip_incomplete_buckets: whole buckets by `inner`; what is left over at a segment's end by
// `none`.
std::unique_ptr<Codec> make_whole_buckets(std::unique_ptr<Codec> inner, std::unique_ptr<Codec> none,
                                          int64_t bucket_size);

// rotation: values are rotated before `inner` encodes them, and back after it decodes them.
std::unique_ptr<Codec> make_rotated(std::unique_ptr<Codec> inner, int rotation);

}  // namespace cgx
