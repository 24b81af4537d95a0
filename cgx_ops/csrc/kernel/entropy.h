// Levels of the compressor `entropy` (docs/reference/entropy_blocks.md): the grid, and the symbols
// that stand for levels.
#pragma once

#include <bit>
#include <cstdint>

namespace cgx {

inline constexpr int kDirectSymbols = 64;  // of levels next to 0, one each
inline constexpr int kExactSymbol = 102;   // a value that is sent exactly
inline constexpr int kEntropySymbols = 103;
inline constexpr float kMostLevel = 8388608;  // 2^23; values from there on are sent exactly

struct EntropyGrid {
  float step = 0;
  float offset = 0.5f;  // nearest rounding: what is added before magnitudes are truncated
  float shift = 0;      // nearest rounding: the distance of decoded magnitudes from the levels
  bool dithered = false;
  uint16_t dither = 0;  // shift rounding: the noise of the first value
  int width = 0;        // of the low bits, which are not coded
};

// The increment of the noise from a value to the next one (modulo 2^16).
inline constexpr uint32_t kDitherStep = 0x9e37;

// The number of bits that follow a symbol.
constexpr int extra_bits_of(int symbol) {
  if (symbol < kDirectSymbols) return 0;
  return symbol == kExactSymbol ? 32 : (symbol - kDirectSymbols) / 2 + 5;
}

}  // namespace cgx
