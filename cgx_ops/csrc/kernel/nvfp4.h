// NVFP4: blocks of 16 values in e2m1 have a scale in e4m3, in units of the bucket's scale in fp32.
// The bucket's scale maps its largest magnitude to the largest number of both.
#pragma once

#include <cstdint>

#include "base/half.h"
#include "base/host_device.h"
#include "kernel/elements.h"

namespace cgx::nvfp4 {

struct Header {
  float scale;    // NaN if a value of the bucket is not finite
  float inverse;  // of the bucket's largest magnitude, for encoders; 0: all scales are 0
};

// Decoded values are at most 6 * 448 * scale, with a few roundings. So a scale of this magnitude
// does not overflow.
inline constexpr float kMost = 0x1.fffp127f;

CGX_HD Header header_of_bucket(float largest) {
  if (!is_finite(largest)) return {__builtin_bit_cast(float, kFloat32Nan), 0.0f};
  const float most = largest < kMost ? largest : kMost;
  const float inverse = 1.0f / most;
  return {most / (6.0f * 448.0f), is_finite(inverse) ? inverse : 0.0f};
}

// No encoder writes any other non-finite header.
CGX_HD Header header_of_scale(float scale) {
  return {is_finite(scale) ? scale : __builtin_bit_cast(float, kFloat32Nan), 0.0f};
}

CGX_HD float scale_of_byte(const Header& header, uint32_t byte) {
  return rounded_product(header.scale, magnitude_of_code(byte & 0x7f, e4m3()));
}

CGX_HD BlockScale scale_of_block(const Header& header, float largest) {
  if (!is_finite(header.scale)) return {0, header.scale, 0.0f};
  const float share = rounded_product(largest, header.inverse);
  const uint32_t byte = nearest_code(rounded_product(448.0f, share), e4m3());
  const float value = scale_of_byte(header, byte);
  const float inverse = 1.0f / value;
  return {byte, value, is_finite(inverse) ? inverse : 0.0f};
}

}  // namespace cgx::nvfp4
