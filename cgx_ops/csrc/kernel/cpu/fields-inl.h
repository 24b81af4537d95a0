// Packs codes into fields: bit fields of `kBits` bits per code, or trits.
//
//   1. sixteen codes of kBits bits <-> 2 * kBits bytes
//   2. BitField, TritField: the groups of a field, and the remainder at its end
//
// Neighbors are joined in vector registers first: two 32-bit lanes become one 64-bit lane with 2 *
// kBits bits. These are narrowed to bytes (or 16-bit words, for more than 4 bits) in general
// registers, where two shift-and-or steps remove the gaps. 4 and 8 bits need no such step.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernel/bucket_format.h"
#include "kernel/cpu/vectors-inl.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

// ---- 1. sixteen codes ----

template <int kBits, int kLane>
constexpr uint64_t kFields =
    ((uint64_t{1} << kBits) - 1) * (kLane == 8 ? 0x0101010101010101 : 0x0001000100010001);

// Moves fields of kBits bits, each at the low end of a lane of kLane bits (8 or 16), next to each
// other. Uses one instruction (pext) if available. The AVX2 target does not, because the first AMD
// processors with pext execute it slowly.
template <int kBits, int kLane>
[[gnu::always_inline]] inline uint64_t squeeze(uint64_t word) {
#if defined(__BMI2__)
  return _pext_u64(word, kFields<kBits, kLane>);
#else
  if constexpr (kLane == 8 && kBits < 8) {
    word = (word & 0x00ff00ff00ff00ff) | ((word & 0xff00ff00ff00ff00) >> (8 - kBits));
    return squeeze<2 * kBits, 16>(word);
  } else if constexpr (kLane == 16 && kBits < 16) {
    word = (word & 0x0000ffff0000ffff) | ((word & 0xffff0000ffff0000) >> (16 - kBits));
    return (word & 0x00000000ffffffff) | ((word & 0xffffffff00000000) >> (32 - 2 * kBits));
  } else {
    return word;
  }
#endif
}

// The inverse. Bits above the fields are ignored.
template <int kBits, int kLane>
[[gnu::always_inline]] inline uint64_t spread(uint64_t word) {
#if defined(__BMI2__)
  return _pdep_u64(word, kFields<kBits, kLane>);
#else
  if constexpr (kLane == 8 && kBits < 8) {
    constexpr uint64_t kOne = ((uint64_t{1} << kBits) - 1) * 0x0001000100010001;
    word = spread<2 * kBits, 16>(word);
    return (word & kOne) | ((word & (kOne << kBits)) << (8 - kBits));
  } else if constexpr (kLane == 16 && kBits < 16) {
    constexpr uint64_t kFour = (uint64_t{1} << (2 * kBits)) - 1;
    constexpr uint64_t kTwo = ((uint64_t{1} << kBits) - 1) * 0x0000000100000001;
    word = (word & kFour) | ((word & (kFour << (2 * kBits))) << (32 - 2 * kBits));
    return (word & kTwo) | ((word & (kTwo << kBits)) << (16 - kBits));
  } else {
    return word;
  }
#endif
}

// Loads kBytes bytes (2, or 4 to 8) as a word, as two overlapping parts. (Copying byte by byte
// would force the word through memory.)
template <int kBytes>
using WordPart =
    std::conditional_t<kBytes == 2, uint16_t, std::conditional_t<kBytes == 8, uint64_t, uint32_t>>;

template <int kBytes>
[[gnu::always_inline]] inline uint64_t load_word(const std::byte* from) {
  using Part = WordPart<kBytes>;
  constexpr int kLast = kBytes - static_cast<int>(sizeof(Part));
  const auto* first = reinterpret_cast<const Stored<Part>*>(from);
  const auto* last = reinterpret_cast<const Stored<Part>*>(from + kLast);
  return uint64_t{first->value} | uint64_t{last->value} << (8 * kLast);
}

template <int kBytes>
[[gnu::always_inline]] inline void store_word(uint64_t word, std::byte* to) {
  using Part = WordPart<kBytes>;
  constexpr int kLast = kBytes - static_cast<int>(sizeof(Part));
  reinterpret_cast<Stored<Part>*>(to)->value = static_cast<Part>(word);
  reinterpret_cast<Stored<Part>*>(to + kLast)->value = static_cast<Part>(word >> (8 * kLast));
}

// Writes 2 * kBits bytes.
template <int kBits>
[[gnu::always_inline]] inline void pack16(const Ints16& levels, std::byte* field) {
  if constexpr (kBits == 8) {
    const TwoWords bytes = bytes_of_ints(levels);
    __builtin_memcpy(field, &bytes, 16);
  } else {
    const auto pairs = map<Ints16>(levels, [](Ints lanes) {
      const auto words = Words(lanes);
      return Ints(words | (words >> (32 - kBits)));  // the odd lane's bits remain above and are
                                                     // narrowed away
    });
    if constexpr (kBits <= 4) {
      store_word<2 * kBits>(squeeze<2 * kBits, 8>(bytes_of_words(pairs)), field);
    } else {
      const TwoWords words = halves_of_words(pairs);
      store_word<kBits>(squeeze<2 * kBits, 16>(words.at[0]), field);
      store_word<kBits>(squeeze<2 * kBits, 16>(words.at[1]), field + kBits);
    }
  }
}

// Reads 2 * kBits bytes.
template <int kBits>
[[gnu::always_inline]] inline Ints16 unpack16(const std::byte* field) {
  if constexpr (kBits == 8) {
    TwoWords bytes;
    __builtin_memcpy(&bytes, field, 16);
    return ints_of_bytes(bytes);
  } else {
    Ints16 pairs;
    if constexpr (kBits <= 4) {
      pairs = words_of_bytes(spread<2 * kBits, 8>(load_word<2 * kBits>(field)));
    } else {
      pairs = words_of_halves({spread<2 * kBits, 16>(load_word<kBits>(field)),
                               spread<2 * kBits, 16>(load_word<kBits>(field + kBits))});
    }
    return map<Ints16>(pairs, [](Ints lanes) {
      constexpr uint64_t kLevel = (uint64_t{1} << kBits) - 1;
      const auto words = Words(lanes);
      return Ints((words | (words << (32 - kBits))) & (kLevel << 32 | kLevel));
    });
  }
}

// ---- 2. fields ----

[[gnu::always_inline]] inline Ints16 same_code(int32_t code) {
  Ints16 codes;
  for (auto& lanes : codes.at) lanes = Ints{} + code;
  return codes;
}

// A group has kSteps times sixteen codes in kGroupBytes bytes. pack_last and unpack_last handle the
// fewer codes at the end of a bucket.
template <int kBits>
struct BitField {
  static constexpr int kSteps = 1;
  static constexpr int64_t kGroupBytes = 2 * kBits;

  [[gnu::always_inline]] static void pack(const Ints16 (&codes)[1], std::byte* field) {
    pack16<kBits>(codes[0], field);
  }
  [[gnu::always_inline]] static void unpack(const std::byte* field, Ints16 (&codes)[1]) {
    codes[0] = unpack16<kBits>(field);
  }
  [[gnu::always_inline]] static void pack_last(const Ints16 (&codes)[1], int64_t bytes,
                                               int64_t /*numel*/, std::byte* field) {
    std::byte packed[kGroupBytes];
    pack16<kBits>(codes[0], packed);
    __builtin_memcpy(field, packed, static_cast<size_t>(bytes));
  }
  [[gnu::always_inline]] static void unpack_last(const std::byte* field, int64_t bytes,
                                                 int64_t /*numel*/, Ints16 (&codes)[1]) {
    std::byte packed[kGroupBytes] = {};
    __builtin_memcpy(packed, field, static_cast<size_t>(bytes));
    codes[0] = unpack16<kBits>(packed);
  }
};

// Five codes of 0, 1, 2 per byte. Byte j of a group's sixteen has codes j, 16 + j, ... 64 + j, so
// all lanes compute the same. In a last group of b bytes the distance is b.
struct TritField {
  static constexpr int kSteps = 5;
  static constexpr int64_t kGroupBytes = 16;
  static constexpr int kCodes = kSteps * kSixteen;

  [[gnu::always_inline]] static void pack(const Ints16 (&codes)[5], std::byte* field) {
    Ints16 packed = codes[4];
    for (int step = 3; step >= 0; --step)
      for (int i = 0; i < kRegisters; ++i) packed.at[i] = packed.at[i] * 3 + codes[step].at[i];
    const TwoWords bytes = bytes_of_ints(packed);
    __builtin_memcpy(field, &bytes, 16);
  }
  [[gnu::always_inline]] static void unpack(const std::byte* field, Ints16 (&codes)[5]) {
    TwoWords bytes;
    __builtin_memcpy(&bytes, field, 16);
    Ints16 rest = ints_of_bytes(bytes);
    for (int step = 0; step < 4; ++step) {
      for (int i = 0; i < kRegisters; ++i) {
        const Ints third = (rest.at[i] * 171) >> 9;  // for values below 256
        codes[step].at[i] = rest.at[i] - 3 * third;
        rest.at[i] = third;
      }
    }
    codes[4] = rest;
  }
  [[gnu::noinline]] static void pack_last(const Ints16 (&codes)[5], int64_t bytes, int64_t numel,
                                          std::byte* field) {
    int32_t code[kCodes];
    for (int step = 0; step < kSteps; ++step) store_registers(codes[step], code + 16 * step);
    for (int64_t j = 0; j < bytes; ++j) {
      int32_t packed = 0;
      for (int64_t at = j + 4 * bytes; at >= 0; at -= bytes)
        packed = packed * 3 + (at < numel ? code[at] : 1);
      field[j] = static_cast<std::byte>(packed);
    }
  }
  [[gnu::noinline]] static void unpack_last(const std::byte* field, int64_t bytes, int64_t numel,
                                            Ints16 (&codes)[5]) {
    int32_t code[kCodes] = {};
    for (int64_t j = 0; j < bytes; ++j) {
      auto rest = static_cast<int32_t>(field[j]);
      for (int64_t at = j; at < numel; at += bytes) {
        code[at] = at < j + 4 * bytes ? rest % 3 : rest;
        rest /= 3;
      }
    }
    for (int step = 0; step < kSteps; ++step)
      codes[step] = load_registers<Ints16>(code + 16 * step);
  }
};

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
