// Encoding and decoding on a GPU without communication, for tests and benchmarks of kernels.
#pragma once

#include <cstdint>

#include "compressor/codec.h"
#include "device/queue.h"

namespace cgx::device {

// The arguments of Codec::encode and decode: settings, and a run of values that begins at
// first_index.
struct Run {
  CodecSettings settings;
  Rounding rounding;
  int64_t numel;
  int64_t first_index;
};
void quantize(Queue& queue, const Run& run, const void* values, void* message);
void dequantize(Queue& queue, const Run& run, const void* message, void* values);
// Sums `count` messages, which are `stride` bytes apart, in their order, and encodes the sum.
void sum_encoded(Queue& queue, const Run& run, const void* messages, int32_t count, int64_t stride,
                 void* message);

}  // namespace cgx::device
