// Levels (one byte each) <-> fields of `bits` bits. Eight levels are one 64-bit word of bytes and
// `bits` bytes of the field: three shift-and-or steps squeeze a word or spread it again, and
// compilers run these steps on several words at once.
#pragma once

#include <cstdint>

#include "kernel/cpu/values-inl.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

// Levels handled between memory and the field: a multiple of the 128 elements of a noise block.
constexpr int kTile = 512;

template <int kBits>
[[gnu::always_inline]] inline uint64_t squeeze(uint64_t word) {
  word = (word & 0x00ff00ff00ff00ff) | ((word & 0xff00ff00ff00ff00) >> (8 - kBits));
  word = (word & 0x0000ffff0000ffff) | ((word & 0xffff0000ffff0000) >> (16 - 2 * kBits));
  return (word & 0x00000000ffffffff) | ((word & 0xffffffff00000000) >> (32 - 4 * kBits));
}

template <int kBits>
[[gnu::always_inline]] inline uint64_t spread(uint64_t word) {
  constexpr uint64_t kFour = (uint64_t{1} << (4 * kBits)) - 1;
  constexpr uint64_t kTwo = ((uint64_t{1} << (2 * kBits)) - 1) * 0x0000000100000001;
  constexpr uint64_t kOne = ((uint64_t{1} << kBits) - 1) * 0x0001000100010001;
  word = (word & kFour) | ((word & (kFour << (4 * kBits))) << (32 - 4 * kBits));
  word = (word & kTwo) | ((word & (kTwo << (2 * kBits))) << (16 - 2 * kBits));
  return (word & kOne) | ((word & (kOne << kBits)) << (8 - kBits));
}

// `levels` is a tile of which the first n count; pack() may overwrite the rest of the last word.
template <int kBits>
void pack_as(uint8_t* __restrict levels, int n, std::byte* __restrict field) {
  for (int i = n; i % 8 != 0; ++i) levels[i] = 0;
  const auto* words = reinterpret_cast<const Stored<uint64_t>*>(levels);
  uint64_t squeezed[kTile / 8];
  for (int i = 0; i < (n + 7) / 8; ++i) squeezed[i] = squeeze<kBits>(words[i].value);
  for (int i = 0; i < n / 8; ++i) {
    __builtin_memcpy(field + kBits * i, &squeezed[i], kBits);
  }
  if (n % 8 != 0) {
    __builtin_memcpy(field + kBits * (n / 8), &squeezed[n / 8], (n % 8 * kBits + 7) / 8);
  }
}

// Fills whole words of `levels`: up to the next multiple of 8 after n.
template <int kBits>
void unpack_as(const std::byte* __restrict field, int n, uint8_t* __restrict levels) {
  auto* words = reinterpret_cast<Stored<uint64_t>*>(levels);
  uint64_t squeezed[kTile / 8];
  for (int i = 0; i < n / 8; ++i) {
    squeezed[i] = 0;
    __builtin_memcpy(&squeezed[i], field + kBits * i, kBits);
  }
  if (n % 8 != 0) {
    squeezed[n / 8] = 0;
    __builtin_memcpy(&squeezed[n / 8], field + kBits * (n / 8), (n % 8 * kBits + 7) / 8);
  }
  for (int i = 0; i < (n + 7) / 8; ++i) words[i].value = spread<kBits>(squeezed[i]);
}

using Pack = void (*)(uint8_t* levels, int n, std::byte* field);
using Unpack = void (*)(const std::byte* field, int n, uint8_t* levels);
constexpr Pack kPack[9] = {nullptr,    pack_as<1>, pack_as<2>, pack_as<3>, pack_as<4>,
                           pack_as<5>, pack_as<6>, pack_as<7>, pack_as<8>};
constexpr Unpack kUnpack[9] = {nullptr,      unpack_as<1>, unpack_as<2>, unpack_as<3>, unpack_as<4>,
                               unpack_as<5>, unpack_as<6>, unpack_as<7>, unpack_as<8>};

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
