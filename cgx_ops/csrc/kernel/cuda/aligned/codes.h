// A lane's codes of a record: 16 levels of kBits, in chunks as its values (tile.h).
//
//   1. memory
//   2. decode
//   3. encode
#pragma once

#include <cstdint>

#include "kernel/cuda/aligned/tile.h"
#include "kernel/cuda/aligned/values.h"
#include "kernel/cuda/arithmetic.h"
#include "kernel/cuda/group.h"
#include "kernel/cuda/memory.h"
#include "kernel/cuda/uniform.h"

namespace cgx::device::cuda::aligned {

template <int kBits, int kChunk>
struct Codes {
  static constexpr int kChunkBytes = kChunk * kBits / 8;
  static constexpr int kChunks = kLaneValues / kChunk;
  // A word holds a chunk of up to 32 bits, or a part of a longer one.
  static constexpr int kWordBytes = kChunkBytes < 4 ? kChunkBytes : 4;
  static constexpr int kWordsOfChunk = kChunkBytes / kWordBytes;
  static constexpr int kWords = kChunks * kWordsOfChunk;
  static constexpr int kCodesOfWord = 8 * kWordBytes / kBits;

  uint32_t word[kWords];
};

// ---- 1. memory ----

// Up to 8 bytes at a time, because records are aligned to 8 bytes.
template <int kBits, int kChunk>
CGX_LANE Codes<kBits, kChunk> load_codes(const std::byte* at, int distance) {
  using Type = Codes<kBits, kChunk>;
  Type codes;
  CGX_UNROLL
  for (int c = 0; c < Type::kChunks; ++c) {
    const std::byte* from = at + c * distance;
    uint32_t* word = codes.word + c * Type::kWordsOfChunk;
    if constexpr (Type::kChunkBytes == 1) word[0] = load<uint8_t>(from);
    if constexpr (Type::kChunkBytes == 2) word[0] = load<uint16_t>(from);
    if constexpr (Type::kChunkBytes == 4) word[0] = load<uint32_t>(from);
    CGX_UNROLL
    for (int i = 0; i + 1 < Type::kWordsOfChunk; i += 2) {
      const auto two = load<uint64_t>(from + 4 * i);
      word[i] = static_cast<uint32_t>(two);
      word[i + 1] = static_cast<uint32_t>(two >> 32);
    }
  }
  return codes;
}

template <int kBits, int kChunk>
CGX_LANE void store_codes(std::byte* at, int distance, const Codes<kBits, kChunk>& codes) {
  using Type = Codes<kBits, kChunk>;
  CGX_UNROLL
  for (int c = 0; c < Type::kChunks; ++c) {
    std::byte* to = at + c * distance;
    const uint32_t* word = codes.word + c * Type::kWordsOfChunk;
    if constexpr (Type::kChunkBytes == 1) store(to, static_cast<uint8_t>(word[0]));
    if constexpr (Type::kChunkBytes == 2) store(to, static_cast<uint16_t>(word[0]));
    if constexpr (Type::kChunkBytes == 4) store(to, word[0]);
    CGX_UNROLL
    for (int i = 0; i + 1 < Type::kWordsOfChunk; i += 2)
      store(to + 4 * i, uint64_t{word[i + 1]} << 32 | word[i]);
  }
}

CGX_LANE Header load_header(const std::byte* record) {
  const auto word = load<uint64_t>(record);
  return {float_of(static_cast<uint32_t>(word)), float_of(static_cast<uint32_t>(word >> 32))};
}
CGX_LANE void store_header(std::byte* record, const Header& header) {
  store(record, uint64_t{bits_of(header.second)} << 32 | bits_of(header.first));
}

// ---- 2. decode ----

// A lane's memory for values in a rare case: registers cannot be indexed by a variable.
inline constexpr int kScratchBytes = 4 * kLaneValues;

CGX_LANE void load_scratch(const std::byte* scratch, Values* values) {
  CGX_UNROLL
  for (int i = 0; i < kLaneValues; i += 4)
    widen_word<Float32>(load<Words4>(scratch + 4 * i), values->at + i);
}
CGX_LANE void store_scratch(std::byte* scratch, const Values& values) {
  CGX_UNROLL
  for (int i = 0; i < kLaneValues; i += 4)
    store(scratch + 4 * i, rounded_word<Float32>(values.at + i));
}

// Decodes records of any magnitude, and non-finite ones.
template <int kBits, int kChunk>
CGX_LANE void decode_any(Codes<kBits, kChunk> codes, const Header& header, std::byte* scratch,
                         Values* values) {
  using Type = Codes<kBits, kChunk>;
  const bool finite = is_finite(header.first) && is_finite(header.second);
  CGX_ROLLED
  for (int i = 0; i < kLaneValues; ++i) {
    const float level = float_of((codes.word[0] & ((1u << kBits) - 1)) | kIntegerBits);
    store(scratch + 4 * i, finite ? value_of_level(level, header) : float_of(kFloat32Nan));
    codes.word[0] >>= kBits;
    if ((i + 1) % Type::kCodesOfWord != 0) continue;
    CGX_UNROLL
    for (int w = 1; w < Type::kWords; ++w) codes.word[w - 1] = codes.word[w];
  }
  load_scratch(scratch, values);
}

// Decodes to values without other NaNs than the canonical one. A code at position `at` of the
// fraction of a float in [1, 2) is 1 + code * 2^(at - 23). Multiplied by s = step * 2^(23 - at),
// minus s, rounded once, this is fp32(code * step) in one operation, without a shift.
template <int kBits, int kChunk>
CGX_LANE void decode(const Codes<kBits, kChunk>& codes, const Header& header, std::byte* scratch,
                     Values* values) {
  using Type = Codes<kBits, kChunk>;
  constexpr int kPeriod = kBits == 8 ? 16 : 4 * kBits;  // positions below this are used
  constexpr uint32_t kMask = (1u << kBits) - 1;
  const uint32_t one = one_in_register();
  const float largest = multiply(header.second, 8388608.0f);  // 2^23
  if (!is_finite(header.first) || !is_finite(largest)) {
    decode_any(codes, header, scratch, values);
    return;
  }
  CGX_UNROLL
  for (int w = 0; w < Type::kWords; ++w) {
    CGX_UNROLL
    for (int i = 0; i < Type::kCodesOfWord; ++i) {
      const int at = i * kBits % kPeriod;
      const uint32_t word = codes.word[w] >> (i * kBits - at);
      const float scale = at ? multiply(largest, power_of_two(-at)) : largest;
      const float code = float_of((word & (kMask << at)) | one);
      values->at[w * Type::kCodesOfWord + i] = add(header.first, multiply_add(code, scale, -scale));
    }
  }
}

// ---- 3. encode ----

// Places levels, given as integers in floats (floor_as_integer), next to each other.
template <int kBits, int kChunk>
CGX_LANE Codes<kBits, kChunk> pack(const Values& levels) {
  using Type = Codes<kBits, kChunk>;
  Type codes;
  CGX_UNROLL
  for (int w = 0; w < Type::kWords; ++w)
    codes.word[w] = digits<Type::kCodesOfWord>(levels.at + w * Type::kCodesOfWord, 1u << kBits);
  return codes;
}

}  // namespace cgx::device::cuda::aligned
