// Access to unaligned memory in words as wide as possible. Never writes, or reads from global
// memory, a byte outside of the given range.
//
//   1. words of 4 and 16 bytes, and windows between them
//   2. units of eight values
//   3. runs of bytes, copied by a group between global and shared memory
//
// Values and messages are in global memory. `buffer` is a group's shared memory, aligned to 16
// bytes, of which up to kWindow bytes after the last used one may be read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel/cuda/arithmetic.h"
#include "kernel/cuda/group.h"
#include "kernel/cuda/work.h"

namespace cgx::device::cuda {

// ---- 1. words ----

struct alignas(16) Words4 {
  uint32_t at[4];
};
inline constexpr int kWindow = 16;

CGX_LANE int misalignment(const std::byte* at, int to) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(at) % static_cast<uintptr_t>(to));
}

// One load or store. `at` is aligned to T.
template <typename T>
CGX_LANE T load(const std::byte* at) {
#if defined(__CUDACC__)
  return *reinterpret_cast<const T*>(at);
#else
  if (misalignment(at, alignof(T)) != 0) __builtin_trap();  // as on a GPU
  T value;
  __builtin_memcpy(&value, at, sizeof(T));
  return value;
#endif
}
template <typename T>
CGX_LANE void store(std::byte* at, const T& value) {
#if defined(__CUDACC__)
  *reinterpret_cast<T*>(at) = value;
#else
  if (misalignment(at, alignof(T)) != 0) __builtin_trap();
  __builtin_memcpy(at, &value, sizeof(T));
#endif
}
#if defined(__CUDACC__)
// Specialized because a struct would be split into several accesses.
template <>
CGX_LANE Words4 load<Words4>(const std::byte* at) {
  const uint4 words = *reinterpret_cast<const uint4*>(at);
  return {{words.x, words.y, words.z, words.w}};
}
template <>
CGX_LANE void store<Words4>(std::byte* at, const Words4& value) {
  *reinterpret_cast<uint4*>(at) = make_uint4(value.at[0], value.at[1], value.at[2], value.at[3]);
}
#endif

// Four of the eight bytes of two words, from byte `shift / 8` on.
CGX_LANE uint32_t window(uint32_t low, uint32_t high, int shift) {
#if defined(__CUDACC__)
  return __funnelshift_r(low, high, static_cast<uint32_t>(shift));
#else
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> shift);
#endif
}

// Loads up to eight bytes at any offset of a buffer; further bytes of the result are arbitrary.
CGX_LANE uint64_t load_field(const std::byte* buffer, int at, int bytes) {
  const std::byte* words = buffer + at / 4 * 4;
  const int offset = at % 4;
  const auto first = load<uint32_t>(words);
  const uint32_t second = offset + bytes > 4 ? load<uint32_t>(words + 4) : 0;
  const uint32_t third = offset + bytes > 8 ? load<uint32_t>(words + 8) : 0;
  const uint32_t low = window(first, second, 8 * offset);
  return uint64_t{window(second, third, 8 * offset)} << 32 | low;
}

// Stores up to eight bytes at a multiple of `bytes`.
CGX_LANE void store_field(std::byte* at, uint64_t field, int bytes) {
  if (bytes % 4 == 0) {
    store(at, static_cast<uint32_t>(field));
    if (bytes == 8) store(at + 4, static_cast<uint32_t>(field >> 32));
  } else if (bytes % 2 == 0) {
    for (int i = 0; i < bytes; i += 2) store(at + i, static_cast<uint16_t>(field >> (8 * i)));
  } else {
    for (int i = 0; i < bytes; ++i) store(at + i, static_cast<uint8_t>(field >> (8 * i)));
  }
}

// ---- 2. units ----

struct Unit {
  float at[kUnit];
};

template <typename Value>
CGX_LANE Unit widened(const uint32_t* words) {
  Unit unit;
  CGX_UNROLL
  for (int i = 0; i < kUnit; ++i) {
    if constexpr (sizeof(typename Value::Bits) == 4) {
      unit.at[i] = Value::widen(words[i]);
    } else {
      unit.at[i] = Value::widen(static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2))));
    }
  }
  return unit;
}

template <typename Value>
inline constexpr int kUnitBytes = kUnit * static_cast<int>(sizeof(typename Value::Bits));

// Loads a whole unit, aligned to 16 bytes.
template <typename Value>
CGX_LANE Unit load_unit(const std::byte* at) {
  Words4 words[kUnitBytes<Value> / 16];
  CGX_UNROLL
  for (int i = 0; i < kUnitBytes<Value> / 16; ++i) words[i] = load<Words4>(at + 16 * i);
  return widened<Value>(words[0].at);
}

// Stores a unit of floats, aligned to 16 bytes.
CGX_LANE void store_floats(std::byte* to, const Unit& unit) {
  CGX_UNROLL
  for (int i = 0; i < kUnit; i += 4)
    store(to + 4 * i, Words4{{bits_of(unit.at[i]), bits_of(unit.at[i + 1]), bits_of(unit.at[i + 2]),
                              bits_of(unit.at[i + 3])}});
}

// Loads the first `count` values of a unit at any offset of a buffer; the others repeat the first.
template <typename Value>
CGX_LANE Unit load_unit_of_buffer(const std::byte* buffer, int at, int count) {
  if (count == kUnit && at % 16 == 0) return load_unit<Value>(buffer + at);
  const std::byte* words = buffer + at / 4 * 4;
  uint32_t aligned[kUnitBytes<Value> / 4 + 1], shifted[kUnitBytes<Value> / 4];
  CGX_UNROLL
  for (int i = 0; i <= kUnitBytes<Value> / 4; ++i)
    aligned[i] =
        4 * i < at % 4 + count * (kUnitBytes<Value> / kUnit) ? load<uint32_t>(words + 4 * i) : 0;
  CGX_UNROLL
  for (int i = 0; i < kUnitBytes<Value> / 4; ++i)
    shifted[i] = window(aligned[i], aligned[i + 1], 8 * (at % 4));
  Unit unit = widened<Value>(shifted);
  CGX_UNROLL
  for (int i = 1; i < kUnit; ++i) unit.at[i] = i < count ? unit.at[i] : unit.at[0];
  return unit;
}

// Loads one value from global memory.
template <typename Value>
CGX_LANE float load_value(const std::byte* from) {
  using Bits = typename Value::Bits;
  if (misalignment(from, sizeof(Bits)) == 0) return Value::widen(load<Bits>(from));
  uint32_t bits = 0;
  CGX_UNROLL
  for (int i = 0; i < static_cast<int>(sizeof(Bits)); ++i)
    bits |= static_cast<uint32_t>(from[i]) << (8 * i);
  return Value::widen(static_cast<Bits>(bits));
}

// Rounds and stores the first `count` values. `scratch` is the lane's own shared memory, of
// kUnitBytes. If `to` is unaligned, values are stored one by one, and registers cannot be indexed
// by a variable.
template <typename Value>
CGX_LANE void store_unit(std::byte* to, const Unit& unit, int count, std::byte* scratch) {
  constexpr int kWidth = kUnitBytes<Value> / kUnit;
  Words4 words[kUnitBytes<Value> / 16];
  CGX_UNROLL
  for (int i = 0; i < kUnit; ++i) {
    const uint32_t bits = Value::round(unit.at[i]);
    uint32_t& word = words[i * kWidth / 16].at[i * kWidth / 4 % 4];
    word = kWidth == 4 || i % 2 == 0 ? bits : word | bits << 16;
  }
  if (count == kUnit && misalignment(to, 16) == 0) {
    CGX_UNROLL
    for (int i = 0; i < kUnitBytes<Value> / 16; ++i) store(to + 16 * i, words[i]);
    return;
  }
  CGX_UNROLL
  for (int i = 0; i < kUnitBytes<Value> / 16; ++i) store(scratch + 16 * i, words[i]);
  using Bits = typename Value::Bits;
  const int bytes = count * kWidth;
  if (misalignment(to, kWidth) == 0) {
    CGX_ROLLED
    for (int i = 0; i < bytes; i += kWidth) store(to + i, load<Bits>(scratch + i));
  } else {
    CGX_ROLLED
    for (int i = 0; i < bytes; ++i) to[i] = scratch[i];
  }
}

// ---- 3. runs of bytes ----

// A run of bytes, cut at 16-byte boundaries.
struct Cut {
  int head;   // bytes, less than 16
  int words;  // of 16 bytes
  int tail;   // bytes, less than 16
};
CGX_LANE Cut cut_at_boundaries(const std::byte* run, int bytes) {
  const int to_boundary = (16 - misalignment(run, 16)) % 16;
  const int head = to_boundary < bytes ? to_boundary : bytes;
  return {head, (bytes - head) / 16, (bytes - head) % 16};
}

// Starts a copy from global to shared memory. finish_copies() waits for all copies of this lane.
template <int kBytes>
CGX_LANE void start_copy(std::byte* to, const std::byte* from) {
#if defined(__CUDACC__)
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(from) : "memory");
#else
  __builtin_memcpy(to, from, kBytes);
#endif
}
CGX_LANE void finish_copies() {
#if defined(__CUDACC__)
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// The space for a run in a buffer: it keeps its misalignment to 16 bytes.
CGX_LANE int bytes_in_buffer(const std::byte* run, int bytes) {
  return (misalignment(run, 16) + bytes + 15) / 16 * 16;
}

// A lane's part of copying a run to slot + misalignment(run, 16). `slot` is aligned to 16 bytes.
template <int kLanes>
CGX_LANE void start_copy_in(int lane, std::byte* slot, const std::byte* run, int bytes) {
  std::byte* to = slot + misalignment(run, 16);
  const Cut cut = cut_at_boundaries(run, bytes);
  CGX_ROLLED
  for (int i = lane; i < cut.words; i += kLanes)
    start_copy<16>(to + cut.head + 16 * i, run + cut.head + 16 * i);
  // Sixteen lanes for each end: at most three single bytes and three words of 4 bytes each.
  const bool at_head = lane < 16;
  const int end_lane = lane % 16;
  const int begin = at_head ? 0 : bytes - cut.tail;
  const int length = at_head ? cut.head : cut.tail;
  if (lane >= 32 || length == 0) return;
  // A head ends at a boundary, and a tail begins at one. A run within one word does neither.
  const int single = (4 - misalignment(run + begin, 4)) % 4;
  const int before = single < length ? single : length;
  const int words = (length - before) / 4, after = (length - before) % 4;
  int at;
  if (end_lane < words) {
    start_copy<4>(to + begin + before + 4 * end_lane, run + begin + before + 4 * end_lane);
    return;
  }
  if (end_lane >= 4 && end_lane < 4 + before) {
    at = begin + end_lane - 4;
  } else if (end_lane >= 8 && end_lane < 8 + after) {
    at = begin + length - after + end_lane - 8;
  } else {
    return;
  }
  to[at] = run[at];
}

// A lane's part of copying `bytes` from offset `at` of a buffer to `run`.
template <int kLanes>
CGX_LANE void copy_out(int lane, std::byte* run, const std::byte* buffer, int at, int bytes) {
  const Cut cut = cut_at_boundaries(run, bytes);
  const std::byte* words = buffer + (at + cut.head) / 4 * 4;
  const int shift = 8 * ((at + cut.head) % 4);
  CGX_ROLLED
  for (int i = lane; i < cut.words; i += kLanes) {
    uint32_t from[5];
    CGX_UNROLL
    for (int j = 0; j < 5; ++j) from[j] = load<uint32_t>(words + 16 * i + 4 * j);
    Words4 to;
    CGX_UNROLL
    for (int j = 0; j < 4; ++j) to.at[j] = window(from[j], from[j + 1], shift);
    store(run + cut.head + 16 * i, to);
  }
  const int last = bytes - cut.tail + lane - 16;
  if (lane < cut.head) run[lane] = buffer[at + lane];
  if (lane >= 16 && last < bytes) run[last] = buffer[at + last];
}

}  // namespace cgx::device::cuda
