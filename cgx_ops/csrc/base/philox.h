// Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): a counter of
// four 32-bit words and a key of two give four words of noise. It is stateless: the noise of any
// element can be computed anywhere, independently of threads and chunks. Seven rounds are the
// fewest that pass TestU01's BigCrush, according to the paper.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace cgx {

inline constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53;
inline constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9;
inline constexpr uint32_t kPhiloxWeyl1 = 0xBB67AE85;
inline constexpr int kPhiloxRounds = 7;

// The round keys, equal for all counters.
struct PhiloxKeys {
  uint64_t at[kPhiloxRounds][2];

  CGX_HD explicit PhiloxKeys(uint64_t seed) {
    auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (auto& round : at) {
      round[0] = key0;
      round[1] = key1;
      key0 += kPhiloxWeyl0;
      key1 += kPhiloxWeyl1;
    }
  }
};

// Replaces `words` (the counter) by noise. Word is uint64_t, or a vector of them. The low halves
// hold the 32-bit words; the high halves are ignored and unspecified afterwards, so that one 32 x
// 32 -> 64 bit product provides both halves. multiply(word, constant) multiplies the low halves.
template <typename Word, typename Multiply>
CGX_HD void philox4x32_7(Word (&words)[4], const PhiloxKeys& keys, const Multiply& multiply) {
  CGX_UNROLL
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const Word product0 = multiply(words[0], kPhiloxMultiplier0);
    const Word product1 = multiply(words[2], kPhiloxMultiplier1);
    words[0] = (product1 >> 32) ^ words[1] ^ keys.at[round][0];
    words[1] = product1;
    words[2] = (product0 >> 32) ^ words[3] ^ keys.at[round][1];
    words[3] = product0;
  }
}

// For a single counter.
CGX_HD void philox4x32_7(uint64_t (&words)[4], const PhiloxKeys& keys) {
  philox4x32_7(words, keys, [](uint64_t word, uint32_t by) {
    return uint64_t{static_cast<uint32_t>(word)} * by;
  });
}

}  // namespace cgx
