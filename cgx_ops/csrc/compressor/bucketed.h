// Codecs of buckets: each bucket's values share a header, and become small codes.
#pragma once

#include <memory>

#include "compressor/codec.h"
#include "kernel/bucket_format.h"

namespace cgx {

// bits: of a code, for formats that have several widths.
std::unique_ptr<Codec> make_bucketed(const CodecSettings& settings, BucketFormat format, int bits);

}  // namespace cgx
