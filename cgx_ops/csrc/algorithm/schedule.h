// Index arithmetic: which rank owns which grains (units of Codec::cut()), and which shard a ring
// step handles.
#pragma once

#include <cstdint>

namespace cgx {

// The grains [first, last) of `grains` that rank `owner` of `size` ranks owns: contiguous, and as
// even as whole grains allow.
struct GrainRange {
  int64_t first;
  int64_t last;
};

inline GrainRange owned_grains(int64_t grains, int owner, int size) {
  // 128 bits, because grains * size may overflow 63 bits
  const auto cut = [&](int at) {
    return static_cast<int64_t>(static_cast<__int128>(grains) * at / size);
  };
  return {cut(owner), cut(owner + 1)};
}

// In a ring every rank sends to its right. Shard p starts at rank p + 1. Each hop adds one rank's
// values, and after size - 1 hops it reaches its owner p.
inline int ring_right(int rank, int size) { return (rank + 1) % size; }
inline int ring_left(int rank, int size) { return (rank + size - 1) % size; }
// The shard whose owner is `steps` ranks to the left.
inline int ring_shard(int rank, int steps, int size) {
  return ((rank - steps) % size + size) % size;
}

}  // namespace cgx
