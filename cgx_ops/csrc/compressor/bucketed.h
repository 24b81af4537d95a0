// Codecs of buckets: the values of a bucket share a header and become short codes.
#pragma once

#include <memory>

#include "compressor/codec.h"
#include "kernel/bucket_format.h"

namespace cgx {

// `bits`: of a code, for formats with several widths.
std::unique_ptr<Codec> make_bucketed(const CodecSettings& settings, BucketFormat format, int bits);

}  // namespace cgx
