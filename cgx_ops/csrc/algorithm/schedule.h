// Who owns what, and what passes when: pure index arithmetic.
#pragma once

#include <cstdint>

namespace cgx {

// Grains [first, last) of `grains` that rank `owner` of `size` owns: contiguous, as even as whole
// grains allow.
struct GrainRange {
  int64_t first;
  int64_t last;
};

inline GrainRange owned_grains(int64_t grains, int owner, int size) {
  // In 128 bits: grains * size may exceed 63.
  const auto cut = [&](int at) {
    return static_cast<int64_t>(static_cast<__int128>(grains) * at / size);
  };
  return {cut(owner), cut(owner + 1)};
}

// In a ring every rank sends to its right. Shard p starts at rank p + 1 and, growing by one rank's
// values at each hop, reaches its owner p after size - 1 hops.
inline int ring_right(int rank, int size) { return (rank + 1) % size; }
inline int ring_left(int rank, int size) { return (rank + size - 1) % size; }
// The shard whose owner is `steps` ranks to the left.
inline int ring_shard(int rank, int steps, int size) {
  return ((rank - steps) % size + size) % size;
}

}  // namespace cgx
