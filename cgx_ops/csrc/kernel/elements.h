// The elements of block formats: floats of 8 or 4 bits with a sign, an exponent and a mantissa, as
// in OCP Microscaling Formats 1.0. Bit operations and single roundings only, so all processors give
// the same results.
#pragma once

#include <cstdint>

#include "base/half.h"
#include "base/host_device.h"
#include "kernel/bucket_format.h"

namespace cgx {

struct Element {
  int bits;
  int mantissa_bits;
  int bias;
  uint32_t largest;  // the code of the largest finite magnitude; larger codes are NaN

  // The exponent of the largest finite magnitude.
  CGX_HD constexpr int highest_exponent() const {
    return static_cast<int>(largest >> mantissa_bits) - bias;
  }
  // The exponent field, as fp32, of the smallest normal number. Smaller magnitudes have its
  // spacing.
  CGX_HD constexpr uint32_t lowest_field() const { return static_cast<uint32_t>(128 - bias); }
  CGX_HD constexpr uint32_t magnitude_mask() const { return (1u << (bits - 1)) - 1; }
};
CGX_HD constexpr Element e4m3() { return {8, 3, 7, 0x7e}; }
CGX_HD constexpr Element e5m2() { return {8, 2, 15, 0x7b}; }
CGX_HD constexpr Element e2m1() { return {4, 1, 1, 0x7}; }

CGX_HD constexpr Element element_of(BucketFormat format) {
  if (format == BucketFormat::kMxfp8) return e4m3();
  return format == BucketFormat::kMxfp8E5m2 ? e5m2() : e2m1();
}

// The code of a magnitude below 2^100, rounded to nearest even. Adding a power of two whose unit in
// the last place is the element's spacing rounds, and counts the units.
CGX_HD uint32_t nearest_code(float magnitude, const Element& to) {
  const uint32_t field = __builtin_bit_cast(uint32_t, magnitude) >> 23;
  const uint32_t exponent = field > to.lowest_field() ? field : to.lowest_field();
  const uint32_t anchor = (exponent + 23 - static_cast<uint32_t>(to.mantissa_bits)) << 23;
  const float sum = rounded_sum(magnitude, __builtin_bit_cast(float, anchor));
  const uint32_t units = __builtin_bit_cast(uint32_t, sum) - anchor;
  const uint32_t code = ((exponent - to.lowest_field()) << to.mantissa_bits) + units;
  return code < to.largest ? code : to.largest;
}

// The same, rounded down after noise r in (0, 1) is added, in units of the element's spacing.
CGX_HD uint32_t drawn_code(float magnitude, float r, const Element& to) {
  const uint32_t field = __builtin_bit_cast(uint32_t, magnitude) >> 23;
  const uint32_t exponent = field > to.lowest_field() ? field : to.lowest_field();
  const uint32_t up = (254 + static_cast<uint32_t>(to.mantissa_bits) - exponent) << 23;
  const float units = rounded_product(magnitude, __builtin_bit_cast(float, up));
  const uint32_t code = ((exponent - to.lowest_field()) << to.mantissa_bits) +
                        static_cast<uint32_t>(rounded_sum(units, r));
  return code < to.largest ? code : to.largest;
}

// The magnitude of a code without its sign.
CGX_HD float magnitude_of_code(uint32_t code, const Element& of) {
  const uint32_t shifted = code << (23 - of.mantissa_bits);
  const uint32_t lowest = of.lowest_field() << 23;
  const float subnormal =
      rounded_sum(__builtin_bit_cast(float, shifted + lowest), -__builtin_bit_cast(float, lowest));
  const float normal = __builtin_bit_cast(float, shifted + lowest - (1u << 23));
  const float magnitude = shifted < 1u << 23 ? subnormal : normal;
  return code > of.largest ? __builtin_bit_cast(float, kFloat32Nan) : magnitude;
}

// The scale of a block.
struct BlockScale {
  uint32_t byte;
  float value;    // by which elements are multiplied; NaN: all codes are 0
  float inverse;  // 1 / value, or 0
};

}  // namespace cgx
