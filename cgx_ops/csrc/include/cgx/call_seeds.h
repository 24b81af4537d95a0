// Seeds of successive calls. All bindings use it.
#ifndef CGX_CALL_SEEDS_H_
#define CGX_CALL_SEEDS_H_

#include <cstdint>

namespace cgx {

// Returns the distance of the n-th state of SplitMix64 from the first: n times the golden ratio.
inline int64_t nth_offset(int64_t n) {
  return static_cast<int64_t>(static_cast<uint64_t>(n) * 0x9e3779b97f4a7c15u);
}

// Returns the n-th seed of the stream that begins with `seed`, by SplitMix64's output function.
// (base/seeds.h derives the seeds of segments and blocks from it, with other step sizes.)
inline int64_t nth_seed(int64_t seed, int64_t n) {
  if (n == 0) return seed;
  uint64_t z = static_cast<uint64_t>(seed) + static_cast<uint64_t>(nth_offset(n));
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<int64_t>(z ^ (z >> 31));
}

}  // namespace cgx

#endif  // CGX_CALL_SEEDS_H_
