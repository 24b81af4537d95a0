// The entropy coder: histograms, and rANS with interleaved lanes (Giesen, "Interleaved entropy
// coders", 2014). docs/reference/entropy_coding.md defines the bytes.
//
//   1. histogram
//   2. tables of the encoder and of the decoder
//   3. one symbol
//   4. streams
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel/cpu/values-inl.h"
#include "kernel/rans.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

// ---- 1. histogram ----

// Several histograms, because repeated symbols would wait for the previous store.
void count_symbols(const uint8_t* symbols, int64_t numel, uint32_t* counts) {
  constexpr int kParts = 4;
  uint32_t parts[kParts][kSymbols] = {};
  int64_t i = 0;
  for (; i + 8 <= numel; i += 8) {
    uint64_t word;
    __builtin_memcpy(&word, symbols + i, 8);
    for (int j = 0; j < 8; ++j) ++parts[j % kParts][(word >> 8 * j) & 0xff];
  }
  for (; i < numel; ++i) ++parts[0][symbols[i]];
  for (int s = 0; s < kSymbols; ++s) {
    counts[s] = 0;
    for (const auto& part : parts) counts[s] += part[s];
  }
}

// ---- 2. tables ----

constexpr uint32_t kLowestState = 1u << 15;

// state / frequency = (state * reciprocal >> 32) >> shift for all states below frequency << 19, by
// Granlund and Montgomery's theorem, because frequency^2 <= 2^(13 + shift). A frequency of 1 gives
// state - 1 instead, for which the bias compensates.
struct EncoderTable {
  uint32_t reciprocal[kSymbols];
  uint32_t rest[kSymbols];  // frequency (13 bits), bias (13 bits), shift (4 bits)

  explicit EncoderTable(const uint16_t* frequencies) {
    uint32_t start = 0;
    for (int s = 0; s < kSymbols; ++s) {
      const uint32_t frequency = frequencies[s];
      uint32_t bias = start, shift = 0, inverse = 0xffffffff;
      if (frequency == 1) bias += kFrequencySum - 1;
      if (frequency > 1) {
        shift = 31 - __builtin_clz(frequency - 1);
        inverse =
            static_cast<uint32_t>(((uint64_t{1} << (32 + shift)) + frequency - 1) / frequency);
      }
      reciprocal[s] = inverse;
      rest[s] = frequency | bias << 13 | shift << 26;
      start += frequency;
    }
  }
};

// An entry per slot: symbol (the top 8 bits), frequency - 1 (12 bits), slot - start (12 bits).
struct DecoderTable {
  uint32_t at[kFrequencySum];

  explicit DecoderTable(const uint16_t* frequencies) {
    uint32_t* slot = at;
    for (uint32_t s = 0; s < kSymbols; ++s) {
      const uint32_t frequency = frequencies[s], entry = s << 24 | (frequency - 1) << 12;
      for (uint32_t i = 0; i < frequency; ++i) slot[i] = entry + i;
      slot += frequency;
    }
  }
};

// ---- 3. one symbol ----

[[gnu::always_inline]] inline void put_symbol(const EncoderTable& table, uint8_t symbol,
                                              uint32_t& state, Stored<uint16_t>*& words) {
  const uint32_t rest = table.rest[symbol], frequency = rest & 0x1fff;
  if (state > (frequency << 19) - 1) {
    (--words)->value = static_cast<uint16_t>(state);
    state >>= 16;
  }
  const auto quotient =
      static_cast<uint32_t>(uint64_t{state} * table.reciprocal[symbol] >> 32) >> (rest >> 26);
  state += quotient * (kFrequencySum - frequency) + (rest >> 13 & 0x1fff);
}

// Returns false if a word is missing.
[[gnu::always_inline]] inline bool take_symbol(const DecoderTable& table, uint32_t& state,
                                               const Stored<uint16_t>*& words,
                                               const Stored<uint16_t>* end, uint8_t& symbol) {
  const uint32_t entry = table.at[state % kFrequencySum], upper = state >> kFrequencyBits;
  symbol = static_cast<uint8_t>(entry >> 24);
  state = upper * (entry >> 12 & 0xfff) + upper + (entry & 0xfff);
  if (state < kLowestState) {
    if (words == end) return false;
    state = state << 16 | (words++)->value;
  }
  return true;
}

// ---- 4. streams ----

int64_t rans_encode(const uint8_t* symbols, int64_t numel, int lanes, const uint16_t* frequencies,
                    std::byte* bytes) {
  const EncoderTable table(frequencies);
  uint32_t states[kMostRansLanes];
  for (int lane = 0; lane < lanes; ++lane) states[lane] = kLowestState;
  // The last symbol comes first, so the words are written from the end of the room.
  auto* const end = reinterpret_cast<Stored<uint16_t>*>(bytes + most_rans_bytes(numel, lanes));
  auto* words = end;
  for (int64_t i = numel; i-- > 0;) put_symbol(table, symbols[i], states[i & (lanes - 1)], words);
  const int64_t length = 2 * (end - words);
  __builtin_memcpy(bytes, states, 4 * static_cast<size_t>(lanes));
  __builtin_memmove(bytes + 4 * lanes, words, static_cast<size_t>(length));
  return 4 * lanes + length;
}

bool rans_decode(const std::byte* bytes, int64_t size, int64_t numel, int lanes,
                 const uint16_t* frequencies, uint8_t* symbols) {
  if (size < 4 * lanes || size % 2 != 0) return false;
  uint32_t states[kMostRansLanes];
  __builtin_memcpy(states, bytes, 4 * static_cast<size_t>(lanes));
  for (int lane = 0; lane < lanes; ++lane)
    if (states[lane] < kLowestState || states[lane] >> 31 != 0) return false;
  const DecoderTable table(frequencies);
  const auto* words = reinterpret_cast<const Stored<uint16_t>*>(bytes + 4 * lanes);
  const auto* const end = reinterpret_cast<const Stored<uint16_t>*>(bytes + size);
  for (int64_t i = 0; i < numel; ++i)
    if (!take_symbol(table, states[i & (lanes - 1)], words, end, symbols[i])) return false;
  bool complete = words == end;
  for (int lane = 0; lane < lanes; ++lane) complete &= states[lane] == kLowestState;
  return complete;
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
