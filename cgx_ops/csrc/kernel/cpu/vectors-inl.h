// Sixteen values, in as many native registers as they need: the unit in which codecs work.
// Arithmetic uses the compilers' vector types. The few conversions between widths that compilers
// translate badly are written with intrinsics for each instruction set.
//
//   1. registers of one native size, and sixteen values made of them
//   2. memory <-> sixteen values
//   3. 32-bit and 64-bit lanes <-> contiguous bytes and 16-bit words
#pragma once

#include <cstdint>

#include "kernel/cpu/values-inl.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cgx::cpu::CGX_TARGET {
namespace {

// ---- 1. registers ----

#if defined(__AVX512F__)
#define CGX_REGISTER_BYTES 64
#elif defined(__AVX2__)
#define CGX_REGISTER_BYTES 32
#else
#define CGX_REGISTER_BYTES 16
#endif
typedef float Floats __attribute__((vector_size(CGX_REGISTER_BYTES)));
typedef int32_t Ints __attribute__((vector_size(CGX_REGISTER_BYTES)));
typedef uint64_t Words __attribute__((vector_size(CGX_REGISTER_BYTES)));

constexpr int kSixteen = 16;
constexpr int kLanes = CGX_REGISTER_BYTES / 4;
constexpr int kRegisters = kSixteen / kLanes;
#undef CGX_REGISTER_BYTES

// Elements in order: register by register, lane by lane.
struct Floats16 {
  Floats at[kRegisters];
};
struct Ints16 {
  Ints at[kRegisters];
};

// out = f(in), register by register.
template <typename Out, typename In, typename F>
[[gnu::always_inline]] inline Out map(const In& in, const F& f) {
  Out out;
#pragma GCC unroll 4
  for (int i = 0; i < kRegisters; ++i) out.at[i] = f(in.at[i]);
  return out;
}

[[gnu::always_inline]] inline Floats finite_or_zero(Floats x) {
  const Ints exponent = Ints{} + 0x7f800000;
  return Floats(Ints(x) & ((Ints(x) & exponent) != exponent));
}

// table[i] for each lane i < 8. The table has eight floats.
[[gnu::always_inline]] inline Floats look_up8(const float* table, Ints i) {
#if defined(__AVX512F__)
  const __m512 both = _mm512_maskz_broadcast_f32x8(0xffff, _mm256_loadu_ps(table));
  return Floats(_mm512_maskz_permutexvar_ps(0xffff, __m512i(i), both));
#elif defined(__AVX2__)
  return Floats(_mm256_permutevar8x32_ps(_mm256_loadu_ps(table), __m256i(i)));
#else
  Floats found = Floats{} + table[0];
  for (int j = 1; j < 8; ++j) found = i == j ? Floats{} + table[j] : found;
  return found;
#endif
}

// The largest of the sixteen lanes.
[[gnu::always_inline]] inline int32_t largest_lane(const Ints16& from) {
  const auto larger = [](auto a, auto b) { return a > b ? a : b; };
  Ints all = from.at[0];
  for (int i = 1; i < kRegisters; ++i) all = larger(all, from.at[i]);
#if defined(__AVX512F__)
  const auto eight = larger(__builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7),
                            __builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15));
#elif defined(__AVX2__)
  const Ints eight = all;
#endif
#if defined(__AVX2__)
  auto four = larger(__builtin_shufflevector(eight, eight, 0, 1, 2, 3),
                     __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
#else
  Ints four = all;
#endif
  four = larger(four, __builtin_shufflevector(four, four, 2, 3, 0, 1));
  four = larger(four, __builtin_shufflevector(four, four, 1, 0, 3, 2));
  return four[0];
}

// ---- 2. memory ----

// Register by register: GCC copies a whole struct in smaller steps through the stack.
template <typename Sixteen>
[[gnu::always_inline]] inline Sixteen load_registers(const void* from) {
  Sixteen to;
  for (int i = 0; i < kRegisters; ++i)
    __builtin_memcpy(&to.at[i], static_cast<const std::byte*>(from) + i * sizeof(to.at[0]),
                     sizeof(to.at[0]));
  return to;
}
template <typename Sixteen>
[[gnu::always_inline]] inline void store_registers(const Sixteen& from, void* to) {
  for (int i = 0; i < kRegisters; ++i)
    __builtin_memcpy(static_cast<std::byte*>(to) + i * sizeof(from.at[0]), &from.at[i],
                     sizeof(from.at[0]));
}

// Loads and widens to fp32.
template <typename Value>
[[gnu::always_inline]] inline Floats16 load16(const Stored<typename Value::Bits>* values) {
  if constexpr (sizeof(typename Value::Bits) == sizeof(float)) {
    return load_registers<Floats16>(values);
  } else {
    alignas(64) float widened[kSixteen];
    for (int i = 0; i < kSixteen; ++i) widened[i] = Value::widen(values[i].value);
    return load_registers<Floats16>(widened);
  }
}

// Rounds to the type and stores.
template <typename Value>
[[gnu::always_inline]] inline void store16(const Floats16& from,
                                           Stored<typename Value::Bits>* values) {
  if constexpr (sizeof(typename Value::Bits) == sizeof(float)) {
    store_registers(from, values);
  } else {
    alignas(64) float wide[kSixteen];
    store_registers(from, wide);
    for (int i = 0; i < kSixteen; ++i) values[i].value = Value::round(wide[i]);
  }
}

// Loads n <= 16 values; the others are `fill`.
template <typename Value>
[[gnu::always_inline]] inline Floats16 load_last(const Stored<typename Value::Bits>* values, int n,
                                                 float fill) {
  alignas(64) float last[kSixteen];
  for (int i = 0; i < kSixteen; ++i) last[i] = i < n ? Value::widen(values[i].value) : fill;
  return load_registers<Floats16>(last);
}

// Stores the first n <= 16 values.
template <typename Value>
[[gnu::always_inline]] inline void store_some(const Floats16& from, int n,
                                              Stored<typename Value::Bits>* values) {
  if (n == kSixteen) return store16<Value>(from, values);
  Stored<typename Value::Bits> last[kSixteen];
  store16<Value>(from, last);
  __builtin_memcpy(values, last, static_cast<size_t>(n) * sizeof(last[0]));
}

// ---- 3. wide lanes <-> narrow lanes ----
//
// `ints` are sixteen 32-bit lanes, `words` the same registers as eight 64-bit lanes. Narrowing
// keeps the low bits of each lane; widening fills with zeros.

struct TwoWords {
  uint64_t at[2];
};

#if defined(__AVX2__)

// Moves between the two kinds of registers, not through memory.
[[gnu::always_inline]] inline TwoWords two_words(__m128i from) {
  return {{static_cast<uint64_t>(_mm_cvtsi128_si64(from)),
           static_cast<uint64_t>(_mm_extract_epi64(from, 1))}};
}
[[gnu::always_inline]] inline __m128i one_register(TwoWords words) {
  return _mm_set_epi64x(static_cast<int64_t>(words.at[1]), static_cast<int64_t>(words.at[0]));
}

#endif

#if defined(__AVX512F__)

// The masks are all ones: unmasked versions cause a warning in a header of GCC 12 about an
// undefined register.
[[gnu::always_inline]] inline TwoWords bytes_of_ints(const Ints16& from) {
  const auto bytes = _mm512_maskz_cvtepi32_epi8(0xffff, __m512i(from.at[0]));
  return two_words(bytes);
}
[[gnu::always_inline]] inline uint64_t bytes_of_words(const Ints16& from) {
  return static_cast<uint64_t>(
      _mm_cvtsi128_si64(_mm512_maskz_cvtepi64_epi8(0xff, __m512i(from.at[0]))));
}
[[gnu::always_inline]] inline TwoWords halves_of_words(const Ints16& from) {
  return two_words(_mm512_maskz_cvtepi64_epi16(0xff, __m512i(from.at[0])));
}
[[gnu::always_inline]] inline Ints16 ints_of_bytes(TwoWords bytes) {
  return {Ints(_mm512_maskz_cvtepu8_epi32(0xffff, one_register(bytes)))};
}
[[gnu::always_inline]] inline Ints16 words_of_bytes(uint64_t bytes) {
  return {Ints(_mm512_maskz_cvtepu8_epi64(0xff, _mm_cvtsi64_si128(static_cast<int64_t>(bytes))))};
}
[[gnu::always_inline]] inline Ints16 words_of_halves(TwoWords halves) {
  return {Ints(_mm512_maskz_cvtepu16_epi64(0xff, one_register(halves)))};
}

#elif defined(__AVX2__)

// Takes the bytes `pick` from each half of a register (-1: zero) and ORs the halves.
[[gnu::always_inline]] inline __m128i fold(__m256i from, __m256i pick) {
  const __m256i picked = _mm256_shuffle_epi8(from, pick);
  return _mm_or_si128(_mm256_castsi256_si128(picked), _mm256_extracti128_si256(picked, 1));
}
// The low halves of 64-bit lanes: 0 1 of the first register, 0 1 of the second, then 2 3 and 2 3.
[[gnu::always_inline]] inline __m256i low_halves(const Ints16& from) {
  return __m256i(_mm256_shuffle_ps(__m256(from.at[0]), __m256(from.at[1]), 0x88));
}
[[gnu::always_inline]] inline TwoWords bytes_of_ints(const Ints16& from) {
  const __m256i packed = _mm256_packs_epi32(__m256i(from.at[0]), __m256i(from.at[1]));
  const __m256i pick = _mm256_setr_epi8(0, 2, 4, 6, -1, -1, -1, -1, 8, 10, 12, 14, -1, -1, -1, -1,
                                        -1, -1, -1, -1, 0, 2, 4, 6, -1, -1, -1, -1, 8, 10, 12, 14);
  return two_words(fold(packed, pick));
}
[[gnu::always_inline]] inline uint64_t bytes_of_words(const Ints16& from) {
  const __m256i pick =
      _mm256_setr_epi8(0, 4, -1, -1, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                       -1, -1, 0, 4, -1, -1, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1);
  return static_cast<uint64_t>(_mm_cvtsi128_si64(fold(low_halves(from), pick)));
}
[[gnu::always_inline]] inline TwoWords halves_of_words(const Ints16& from) {
  const __m256i pick =
      _mm256_setr_epi8(0, 1, 4, 5, -1, -1, -1, -1, 8, 9, 12, 13, -1, -1, -1, -1,  //
                       -1, -1, -1, -1, 0, 1, 4, 5, -1, -1, -1, -1, 8, 9, 12, 13);
  return two_words(fold(low_halves(from), pick));
}
[[gnu::always_inline]] inline __m128i low_word(uint64_t word) {
  return _mm_cvtsi64_si128(static_cast<int64_t>(word));
}
[[gnu::always_inline]] inline Ints16 ints_of_bytes(TwoWords bytes) {
  return {Ints(_mm256_cvtepu8_epi32(low_word(bytes.at[0]))),
          Ints(_mm256_cvtepu8_epi32(low_word(bytes.at[1])))};
}
[[gnu::always_inline]] inline Ints16 words_of_bytes(uint64_t bytes) {
  return {Ints(_mm256_cvtepu8_epi64(low_word(bytes))),
          Ints(_mm256_cvtepu8_epi64(low_word(bytes >> 32)))};
}
[[gnu::always_inline]] inline Ints16 words_of_halves(TwoWords halves) {
  return {Ints(_mm256_cvtepu16_epi64(low_word(halves.at[0]))),
          Ints(_mm256_cvtepu16_epi64(low_word(halves.at[1])))};
}

#else

// Lane by lane: compilers use the best instructions of the target.
template <typename Out, typename FromLane, typename ToLane, typename In>
[[gnu::always_inline]] inline Out converted(const In& in) {
  constexpr int kCount = sizeof(In) / sizeof(FromLane);
  static_assert(sizeof(Out) == kCount * sizeof(ToLane));
  FromLane from[kCount];
  ToLane to[kCount];
  Out out;
  __builtin_memcpy(from, &in, sizeof(in));
  for (int i = 0; i < kCount; ++i) to[i] = static_cast<ToLane>(from[i]);
  __builtin_memcpy(&out, to, sizeof(out));
  return out;
}
[[gnu::always_inline]] inline TwoWords bytes_of_ints(const Ints16& from) {
  return converted<TwoWords, uint32_t, uint8_t>(from);
}
[[gnu::always_inline]] inline uint64_t bytes_of_words(const Ints16& from) {
  return converted<uint64_t, uint64_t, uint8_t>(from);
}
[[gnu::always_inline]] inline TwoWords halves_of_words(const Ints16& from) {
  return converted<TwoWords, uint64_t, uint16_t>(from);
}
[[gnu::always_inline]] inline Ints16 ints_of_bytes(TwoWords bytes) {
  return converted<Ints16, uint8_t, uint32_t>(bytes);
}
[[gnu::always_inline]] inline Ints16 words_of_bytes(uint64_t bytes) {
  return converted<Ints16, uint8_t, uint64_t>(bytes);
}
[[gnu::always_inline]] inline Ints16 words_of_halves(TwoWords halves) {
  return converted<Ints16, uint16_t, uint64_t>(halves);
}

#endif

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
