// The arithmetic of kernel/elements.h, sixteen values at a time.
#pragma once

#include "kernel/cpu/fields-inl.h"
#include "kernel/cpu/scales-inl.h"
#include "kernel/cpu/vectors-inl.h"
#include "kernel/elements.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

// Sums and differences modulo 2^32, since exponents of infinities overflow.
typedef uint32_t Moduli __attribute__((vector_size(sizeof(Ints))));
[[gnu::always_inline]] inline Ints plus(Ints a, Ints b) { return Ints(Moduli(a) + Moduli(b)); }
[[gnu::always_inline]] inline Ints minus(Ints a, Ints b) { return Ints(Moduli(a) - Moduli(b)); }

// The codes, with signs, of values times a block's inverse scale. r: noise; used if kNoisy.
template <Element kTo, bool kNoisy>
[[gnu::always_inline]] inline Ints element_codes(Floats x, float inverse, Floats r) {
  constexpr int kFraction = 23 - kTo.mantissa_bits;  // bits that an element lacks
  const Ints lowest = Ints{} + static_cast<int32_t>(kTo.lowest_field() << 23);
  const Ints top = Ints{} + static_cast<int32_t>(kTo.largest);
  const Floats magnitude = magnitudes(x) * inverse;
  const Ints field = Ints(magnitude) & 0x7f800000;
  const Ints exponent = field > lowest ? field : lowest;
  Ints units;
  if constexpr (kNoisy) {
    constexpr auto kTop = static_cast<int32_t>((254u + kTo.mantissa_bits) << 23);
    const auto up = Floats(minus(Ints{} + kTop, exponent));
    units = __builtin_convertvector(magnitude * up + r, Ints);
  } else {
    const Ints anchor = plus(exponent, Ints{} + (kFraction << 23));
    units = minus(Ints(magnitude + Floats(anchor)), anchor);
  }
  const Ints code = plus((exponent - lowest) >> kFraction, units);
  return (code < top ? code : top) | ((Ints(x) >> (32 - kTo.bits)) & (1 << (kTo.bits - 1)));
}

// The values of codes, times a block's scale.
template <Element kOf>
[[gnu::always_inline]] inline Floats element_values(Ints codes, float scale) {
  const Ints code = codes & static_cast<int32_t>(kOf.magnitude_mask());
  Floats magnitude;
  if constexpr (kOf.bits == 4) {
    static constexpr float kTable[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    magnitude = look_up8(kTable, code);
  } else {
    constexpr int32_t kLowest = static_cast<int32_t>(kOf.lowest_field() << 23), kOne = 1 << 23;
    const Ints shifted = code << (23 - kOf.mantissa_bits);
    const Floats subnormal = Floats(shifted + kLowest) - __builtin_bit_cast(float, kLowest);
    magnitude = shifted < kOne ? subnormal : Floats(shifted + (kLowest - kOne));
    magnitude = code > static_cast<int32_t>(kOf.largest) ? Floats{} + kNan : magnitude;
  }
  return Floats(Ints(magnitude * scale) | (codes & (1 << (kOf.bits - 1))) << (32 - kOf.bits));
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
