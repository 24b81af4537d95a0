// The seeds of calls that follow each other, for all bindings: the n-th of a stream.
#ifndef CGX_CALL_SEEDS_H_
#define CGX_CALL_SEEDS_H_

#include <cstdint>

namespace cgx {

// The steps of SplitMix64: n times the golden ratio.
inline int64_t nth_offset(int64_t n) {
  return static_cast<int64_t>(static_cast<uint64_t>(n) * 0x9e3779b97f4a7c15u);
}

// The n-th seed of the stream that begins with `seed`: SplitMix64's output function. (The core's
// seeds of segments and blocks have other steps: base/seeds.h.)
inline int64_t nth_seed(int64_t seed, int64_t n) {
  if (n == 0) return seed;
  uint64_t z = static_cast<uint64_t>(seed) + static_cast<uint64_t>(nth_offset(n));
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<int64_t>(z ^ (z >> 31));
}

}  // namespace cgx

#endif  // CGX_CALL_SEEDS_H_
