// Rotations (kernel/rotation.h), in place: groups of sixteen columns in parallel, then the rest of
// a bucket.
#pragma once

#include <cstdint>

#include "base/half.h"
#include "kernel/cpu/vectors-inl.h"
#include "kernel/rotation.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

// NaN has no sign, so it is normalized.
[[gnu::always_inline]] inline void flip_signs(Stored<uint32_t>* __restrict values, int64_t n) {
  for (int64_t p = 0; p < n; ++p) {
    const uint32_t flipped = values[p].value ^ rotation_sign(static_cast<uint32_t>(p));
    values[p].value = is_nan(flipped) ? kFloat32Nan : flipped;
  }
}

// Transforms `size` rows of `width` values; width is 16 if kSixteenWide.
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
  const float scale = rotation_scale(log, kBack);
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
