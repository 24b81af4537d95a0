// A rotation of blocks of `size` values: signs, then a Hadamard transform. A block's values lie w
// apart, so that w blocks are transformed side by side: sixteen, while there are so many values;
// the rest of a bucket has as many blocks as fit, and what fills none is not rotated.
//
// Values are divided by the root of `size`, by powers of two: a part of it here, the rest there.
#pragma once

#include <cstdint>

#include "kernel/cpu/vectors-inl.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

// Whether value p of a rotation's group changes its sign: the top bit of a multiple of the golden
// ratio, which is as good as random.
[[gnu::always_inline]] inline uint32_t sign_at(uint32_t p) { return p * 0x9e3779b1u & 0x80000000u; }

[[gnu::always_inline]] inline void flip_signs(Stored<uint32_t>* __restrict values, int64_t n) {
  for (int64_t p = 0; p < n; ++p) values[p].value ^= sign_at(static_cast<uint32_t>(p));
}

// `size` rows of `width` values; width 16 where kSixteenWide.
template <bool kSixteenWide>
[[gnu::always_inline]] inline void hadamard(float* values, int size, int64_t width, float scale) {
  auto* at = reinterpret_cast<Stored<float>*>(values);
  for (int half = 1; half < size; half *= 2) {
    const bool last = 2 * half == size;
    const float factor = last ? scale : 1.0f;
    for (int base = 0; base < size; base += 2 * half) {
      for (int row = base; row < base + half; ++row) {
        if constexpr (kSixteenWide) {
          float* first = values + 16 * row;
          float* second = values + 16 * (row + half);
          const auto a = load_registers<Floats16>(first), b = load_registers<Floats16>(second);
          Floats16 sum, difference;
          for (int i = 0; i < kRegisters; ++i) {
            sum.at[i] = (a.at[i] + b.at[i]) * factor;
            difference.at[i] = (a.at[i] - b.at[i]) * factor;
          }
          store_registers(sum, first);
          store_registers(difference, second);
        } else {
          for (int64_t j = 0; j < width; ++j) {
            const float a = at[row * width + j].value, b = at[(row + half) * width + j].value;
            at[row * width + j].value = (a + b) * factor;
            at[(row + half) * width + j].value = (a - b) * factor;
          }
        }
      }
    }
  }
}

// Calls group(at, width) for every group of `size` rows of a bucket.
template <typename Group>
[[gnu::always_inline]] inline void for_groups(int64_t n, int size, const Group& group) {
  int64_t at = 0;
  for (; n - at >= 16 * size; at += 16 * size) group(at, int64_t{16});
  if (const int64_t width = (n - at) / size; width > 0) group(at, width);
}

template <bool kBack>
[[gnu::always_inline]] inline void rotate_bucket(float* values, int64_t n, int size) {
  int log = 0;
  while (1 << log < size) ++log;
  const int shift = kBack ? log - log / 2 : log / 2;
  const float scale = 1.0f / static_cast<float>(1 << shift);
  for_groups(n, size, [&](int64_t at, int64_t width) {
    auto* bits = reinterpret_cast<Stored<uint32_t>*>(values) + at;
    if (!kBack) flip_signs(bits, size * width);
    if (width == 16)
      hadamard<true>(values + at, size, width, scale);
    else
      hadamard<false>(values + at, size, width, scale);
    if (kBack) flip_signs(bits, size * width);
  });
}

void rotate(float* values, int64_t n, int size) { rotate_bucket<false>(values, n, size); }
void rotate_back(float* values, int64_t n, int size) { rotate_bucket<true>(values, n, size); }

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
