// Frequencies of symbols for the entropy coder: from counts, as bytes, and their cost. In integers
// only, so that all processors compute the same. docs/reference/entropy_coding.md defines them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernel/rans.h"

namespace cgx {

using Counts = std::array<uint32_t, kSymbols>;
using Frequencies = std::array<uint16_t, kSymbols>;  // their sum is kFrequencySum

// Unit of costs: a bit is 2^kCostBits.
inline constexpr int kCostBits = 24;

// Returns the cost of a symbol of this frequency (1 to kFrequencySum): -log2(frequency / 4096) in
// units of 2^-24 bits, rounded up.
uint32_t cost_of(int frequency);

// Returns the cost of coding `counts`, without the stream's states. Each symbol that was counted
// must have a frequency.
int64_t cost_of(const Counts& counts, const Frequencies& frequencies);

// Returns frequencies that minimize the cost. Each symbol that was counted has one; there must be
// at least one.
Frequencies frequencies_of(const Counts& counts);

// The largest size of written frequencies: a byte, and 20 bits per symbol.
inline constexpr int64_t kMostFrequencyBytes = 641;

// Writes the frequencies and returns the number of bytes: about one for each symbol that has one.
int64_t write_frequencies(const Frequencies& frequencies, std::byte* bytes);

// Reads the frequencies of symbols below `alphabet` at the beginning of `bytes`, and returns the
// number of bytes read. Throws Error(CGX_INVALID_ARGUMENT) if there are none.
int64_t read_frequencies(std::span<const std::byte> bytes, int alphabet, Frequencies& frequencies);

}  // namespace cgx
