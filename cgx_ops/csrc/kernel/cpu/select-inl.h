// The places of the largest magnitudes. Magnitudes are compared as integers, by which what is not
// finite is larger than all else, NaN most.
//
//   1. how many values are at least as large as a key
//   2. the k-th largest key: from the largest down in growing steps, then by halves
//   3. the places of what is larger, and of the first that are equal
#pragma once

#include <cstdint>

#include "kernel/cpu/values-inl.h"
#include "kernel/cpu/vectors-inl.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

[[gnu::always_inline]] inline Ints16 keys16(const Stored<uint32_t>* values) {
  return map<Ints16>(load_registers<Ints16>(values), [](Ints bits) { return bits & 0x7fffffff; });
}
[[gnu::always_inline]] inline int32_t key_of(const Stored<uint32_t>& value) {
  return static_cast<int32_t>(value.value & 0x7fffffffu);
}

int64_t count_from(const Stored<uint32_t>* __restrict values, int64_t n, int32_t least) {
  constexpr int64_t kMost = int64_t{1} << 30;  // of a lane's count
  int64_t count = 0, i = 0;
  while (i + kSixteen <= n) {
    const int64_t end = n - i < kMost ? n : i + kMost;
    Ints16 counts{};
    for (; i + kSixteen <= end; i += kSixteen) {
      const Ints16 keys = keys16(values + i);
      for (int j = 0; j < kRegisters; ++j) counts.at[j] -= Ints(keys.at[j] >= Ints{} + least);
    }
    int32_t lanes[kSixteen];
    store_registers(counts, lanes);
    for (const int32_t lane : lanes) count += lane;
  }
  for (; i < n; ++i) count += key_of(values[i]) >= least;
  return count;
}

// A key from which on there are k values, or more of which the least are equal. 0 < k <= n.
int32_t select_key(const Stored<uint32_t>* values, int64_t n, int64_t k) {
  int32_t high = 0;  // no value is larger
  for (int64_t i = 0; i < n; ++i) {
    const int32_t key = key_of(values[i]);
    high = key > high ? key : high;
  }
  int32_t low = 0;  // at least k values are as large
  for (int32_t step = 1 << 23; step < high; step = step < (1 << 29) ? 2 * step : high) {
    const int64_t count = count_from(values, n, high - step);
    if (count == k) return high - step;
    if (count > k) {
      low = high - step;
      break;
    }
    high = high - step - 1;
  }
  while (low < high) {
    const int32_t middle = low + (high - low + 1) / 2;
    const int64_t count = count_from(values, n, middle);
    if (count == k) return middle;
    if (count > k)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// In ascending order, of n < 2^32 values. 0 < k <= n.
void select_largest(const float* from, int64_t n, int64_t k, uint32_t* places) {
  const auto* values = reinterpret_cast<const Stored<uint32_t>*>(from);
  const int32_t least = select_key(values, n, k);
  // Of those that are equal to `least` the first are taken.
  int64_t equal = k - count_from(values, n, least + 1);
  const auto take = [&](int64_t i) {
    const int32_t key = key_of(values[i]);
    if (key < least) return;
    if (key == least && equal-- <= 0) return;
    *places++ = static_cast<uint32_t>(i);
  };
  int64_t i = 0;
  for (; i + kSixteen <= n; i += kSixteen) {
    const Ints16 keys = keys16(values + i);
    const TwoWords chosen = bytes_of_ints(
        map<Ints16>(keys, [&](Ints lanes) { return Ints(lanes >= Ints{} + least) & 1; }));
    if ((chosen.at[0] | chosen.at[1]) == 0) continue;
    for (int64_t j = i; j < i + kSixteen; ++j) take(j);
  }
  for (; i < n; ++i) take(i);
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
