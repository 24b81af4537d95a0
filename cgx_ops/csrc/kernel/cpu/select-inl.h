// The indices of the largest magnitudes. Magnitudes are compared as integer keys. Infinity is
// larger than all numbers, and NaN larger than infinity. All NaNs are equal, since processors do
// not agree on their payloads.
//
//   1. Count the values that reach a key, and list their indices.
//   2. Find the k-th largest key: from the largest down in growing steps, then by bisection among
//      the few remaining candidates.
//   3. List the indices of larger values, and of the first equal ones.
#pragma once

#include <cstdint>

#include "kernel/cpu/fields-inl.h"
#include "kernel/cpu/values-inl.h"
#include "kernel/cpu/vectors-inl.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

constexpr int32_t kNanKey = 0x7f800001;

[[gnu::always_inline]] inline Ints16 keys16(const Stored<uint32_t>* values) {
  return map<Ints16>(load_registers<Ints16>(values), [](Ints bits) {
    const Ints magnitude = bits & 0x7fffffff, nan = Ints{} + kNanKey;
    return magnitude < nan ? magnitude : nan;
  });
}
[[gnu::always_inline]] inline int32_t key_of(const Stored<uint32_t>& value) {
  const auto magnitude = static_cast<int32_t>(value.value & 0x7fffffffu);
  return magnitude < kNanKey ? magnitude : kNanKey;
}

int64_t count_from(const Stored<uint32_t>* __restrict values, int64_t n, int32_t least) {
  constexpr int64_t kMost = int64_t{1} << 30;  // limit for the count of a lane
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

// Calls visit(i) for every value that reaches this key, in order, until it returns false. Such
// values are rare, so a branch per sixteen values would often be mispredicted. So first collects
// the groups of sixteen that contain any.
template <typename Visit>
[[gnu::always_inline]] inline void visit_from(const Stored<uint32_t>* __restrict values, int64_t n,
                                              int32_t least, const Visit& visit) {
  struct Sixteen {
    int64_t at;
    TwoWords chosen;  // a byte per value: 0 or 1
  };
  constexpr int64_t kMost = 256;
  Sixteen found[kMost];
  int64_t i = 0;
  while (i + kSixteen <= n) {
    const int64_t end = n - i < kMost * kSixteen ? n : i + kMost * kSixteen;
    int count = 0;
    for (; i + kSixteen <= end; i += kSixteen) {
      const TwoWords chosen = bytes_of_ints(map<Ints16>(
          keys16(values + i), [&](Ints keys) { return Ints(keys >= Ints{} + least) & 1; }));
      found[count] = {i, chosen};
      count += (chosen.at[0] | chosen.at[1]) != 0;
    }
    for (int each = 0; each < count; ++each) {
      const auto [at, chosen] = found[each];
      uint64_t bits = squeeze<1, 8>(chosen.at[0]) | squeeze<1, 8>(chosen.at[1]) << 8;
      for (; bits != 0; bits &= bits - 1)
        if (!visit(at + __builtin_ctzll(bits))) return;
    }
  }
  for (; i < n; ++i)
    if (key_of(values[i]) >= least && !visit(i)) return;
}

int64_t count_from(const float* values, int64_t n, float magnitude) {
  return count_from(reinterpret_cast<const Stored<uint32_t>*>(values), n,
                    __builtin_bit_cast(int32_t, magnitude));
}

int64_t indices_from(const float* values, int64_t n, float magnitude, int64_t most,
                     uint32_t* indices) {
  int64_t found = 0;
  visit_from(reinterpret_cast<const Stored<uint32_t>*>(values), n,
             __builtin_bit_cast(int32_t, magnitude), [&](int64_t i) {
               if (found < most) indices[found] = static_cast<uint32_t>(i);
               return ++found <= most;
             });
  return found;
}

// Bounds on the k-th largest key, or on a key below it that no other value has. At least k values
// reach `low`. Bisects until at most `few` candidates remain.
struct Bounds {
  int32_t low, high;
  int64_t from_low;  // number of values that reach low
};
Bounds halve(const Stored<uint32_t>* values, int64_t n, int64_t k, Bounds bounds, int64_t few) {
  while (bounds.low < bounds.high && bounds.from_low > few) {
    const int32_t middle = bounds.low + (bounds.high - bounds.low + 1) / 2;
    const int64_t count = count_from(values, n, middle);
    if (count >= k)
      bounds = {middle, bounds.high, count};
    else
      bounds.high = middle - 1;
    if (count == k) break;
  }
  return bounds;
}

Bounds step_down(const Stored<uint32_t>* values, int64_t n, int64_t k) {
  int32_t high = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t key = key_of(values[i]);
    high = key > high ? key : high;
  }
  for (int32_t step = 1 << 22; step < high; step = step < (1 << 29) ? 2 * step : high) {
    const int64_t count = count_from(values, n, high - step);
    if (count >= k) return {high - step, high, count};
    high -= step + 1;
  }
  return {0, high, n};
}

// Lists all values larger than `least`, and the first `equal` values that equal it. index_of(i)
// converts the index of a value.
template <typename Place>
[[gnu::always_inline]] inline void take(const Stored<uint32_t>* values, int64_t n, int32_t least,
                                        int64_t equal, const Place& place, uint32_t* indices) {
  visit_from(values, n, least, [&](int64_t i) {
    if (key_of(values[i]) > least || equal-- > 0) *indices++ = place(i);
    return true;
  });
}

// In ascending order, for n < 2^32 values. 0 < k <= n.
void select_largest(const float* from, int64_t n, int64_t k, uint32_t* indices) {
  // A pass over all values takes as long as copying about a hundred of them.
  constexpr int64_t kFew = 1024;
  const int64_t about = 2 * k + 64 < kFew ? 2 * k + 64 : kFew;
  const auto* values = reinterpret_cast<const Stored<uint32_t>*>(from);
  Bounds bounds = halve(values, n, k, step_down(values, n, k), about);
  const auto equal = [&](const Stored<uint32_t>* among, int64_t count) {
    const bool none_larger = bounds.low == kNanKey;
    return k - (none_larger || bounds.from_low == k ? 0 : count_from(among, count, bounds.low + 1));
  };
  if (bounds.from_low > kFew)
    return take(
        values, n, bounds.low, equal(values, n), [](int64_t i) { return static_cast<uint32_t>(i); },
        indices);
  Stored<uint32_t> few[kFew];
  uint32_t few_indices[kFew];
  int64_t count = 0;
  visit_from(values, n, bounds.low, [&](int64_t i) {
    few[count] = values[i];
    few_indices[count++] = static_cast<uint32_t>(i);
    return true;
  });
  bounds = halve(few, count, k, bounds, 0);
  take(
      few, count, bounds.low, equal(few, count), [&](int64_t i) { return few_indices[i]; },
      indices);
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
