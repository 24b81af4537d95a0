// A lane's codes of a record: 16 codes of kBits, in chunks as its values (tile.h).
#pragma once

#include <cstdint>

#include "kernel/cuda/aligned/tile.h"
#include "kernel/cuda/group.h"
#include "kernel/cuda/memory.h"

namespace cgx::device::cuda::aligned {

template <int kBits, int kChunk>
struct Codes {
  static constexpr int kChunkBits = kChunk * kBits;
  static constexpr int kChunks = kLaneValues / kChunk;
  // A word holds a chunk of up to 32 bits, or a part of a longer one.
  static constexpr int kWordBits = kChunkBits < 32 ? kChunkBits : 32;
  static constexpr int kWordsOfChunk = kChunkBits / kWordBits;
  static constexpr int kWords = kChunks * kWordsOfChunk;
  static constexpr int kCodesOfWord = kWordBits / kBits;
  static constexpr bool kHasWholeBytes = kChunkBits % 8 == 0;

  uint32_t word[kWords];
};

// Loads chunks at the given distance in bytes, up to kAlignment bytes at a time. `bit`: the
// position of the first code in the first byte. Bits beyond the last code of a word are arbitrary.
template <int kAlignment, int kBits, int kChunk>
CGX_LANE Codes<kBits, kChunk> load_codes(const std::byte* at, int distance, int bit) {
  using Type = Codes<kBits, kChunk>;
  Type codes;
  CGX_UNROLL
  for (int c = 0; c < Type::kChunks; ++c) {
    const std::byte* from = at + c * distance;
    uint32_t* word = codes.word + c * Type::kWordsOfChunk;
    if constexpr (Type::kChunkBits == 8) word[0] = load<uint8_t>(from);
    if constexpr (Type::kChunkBits == 12)
      word[0] = (uint32_t{load<uint8_t>(from + 1)} << 8 | load<uint8_t>(from)) >> bit;
    if constexpr (Type::kChunkBits == 16) word[0] = load<uint16_t>(from);
    if constexpr (Type::kChunkBits == 24)
      word[0] = uint32_t{load<uint8_t>(from + 2)} << 16 | uint32_t{load<uint8_t>(from + 1)} << 8 |
                load<uint8_t>(from);
    if constexpr (Type::kChunkBits == 32 && kAlignment == 2)
      word[0] = uint32_t{load<uint16_t>(from + 2)} << 16 | load<uint16_t>(from);
    if constexpr (Type::kChunkBits == 32 && kAlignment > 2) word[0] = load<uint32_t>(from);
    CGX_UNROLL
    for (int i = 0; i + 1 < Type::kWordsOfChunk; i += 2) {
      static_assert(Type::kWordsOfChunk == 1 || kAlignment == 8);
      const auto two = load<uint64_t>(from + 4 * i);
      word[i] = static_cast<uint32_t>(two);
      word[i + 1] = static_cast<uint32_t>(two >> 32);
    }
  }
  return codes;
}

template <int kAlignment, int kBits, int kChunk>
CGX_LANE void store_codes(std::byte* at, int distance, const Codes<kBits, kChunk>& codes) {
  using Type = Codes<kBits, kChunk>;
  static_assert(Type::kHasWholeBytes);
  CGX_UNROLL
  for (int c = 0; c < Type::kChunks; ++c) {
    std::byte* to = at + c * distance;
    const uint32_t* word = codes.word + c * Type::kWordsOfChunk;
    if constexpr (Type::kChunkBits == 8) store(to, static_cast<uint8_t>(word[0]));
    if constexpr (Type::kChunkBits == 16) store(to, static_cast<uint16_t>(word[0]));
    if constexpr (Type::kChunkBits == 24) {
      CGX_UNROLL
      for (int i = 0; i < 3; ++i) store(to + i, static_cast<uint8_t>(word[0] >> (8 * i)));
    }
    if constexpr (Type::kChunkBits == 32 && kAlignment == 2) {
      store(to, static_cast<uint16_t>(word[0]));
      store(to + 2, static_cast<uint16_t>(word[0] >> 16));
    }
    if constexpr (Type::kChunkBits == 32 && kAlignment > 2) store(to, word[0]);
    CGX_UNROLL
    for (int i = 0; i + 1 < Type::kWordsOfChunk; i += 2)
      store(to + 4 * i, uint64_t{word[i + 1]} << 32 | word[i]);
  }
}

}  // namespace cgx::device::cuda::aligned
