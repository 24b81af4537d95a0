// The codec alone, on a device: for tests and benchmarks of its kernels.
#pragma once

#include <cstdint>

#include "compressor/codec.h"
#include "device/queue.h"

namespace cgx::device {

// As Codec's encode and decode, of settings and a run that begins at first_index.
struct Run {
  CodecSettings settings;
  Rounding rounding;
  int64_t numel;
  int64_t first_index;
};
void quantize(Queue& queue, const Run& run, const void* values, void* message);
void dequantize(Queue& queue, const Run& run, const void* message, void* values);
// The message of the sum of `count` messages, `stride` bytes apart, in their order.
void sum_encoded(Queue& queue, const Run& run, const void* messages, int32_t count, int64_t stride,
                 void* message);

}  // namespace cgx::device
