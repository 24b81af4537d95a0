// Types that all layers share: enums of cgx.h as C++ enums, and sizes of values and messages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cgx/config.h"

namespace cgx {

enum class Dtype : int32_t {
  kFloat32 = CGX_FLOAT32,
  kFloat16 = CGX_FLOAT16,
  kBfloat16 = CGX_BFLOAT16
};
enum class Op : int32_t {
  kSum = CGX_SUM,
  kAvg = CGX_AVG,
  kMin = CGX_MIN,
  kMax = CGX_MAX,
  kProduct = CGX_PRODUCT
};

inline constexpr int kExactBits = 32;

// A message size that suits all transports: Open MPI still sends it eagerly over TCP.
inline constexpr int64_t kChunkBytes = 32 * 1024;

inline int64_t size_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

enum class RoundingMode : int32_t {
  kNearest = CGX_NEAREST,
  kStochastic = CGX_STOCHASTIC,
  kShift = CGX_SHIFT
};

// How an encoder rounds. The noise of element i of a segment has the Philox counter (i, rank,
// phase) and the key `seed`, so it does not depend on threads or chunks.
struct Rounding {
  RoundingMode mode = RoundingMode::kNearest;
  uint64_t seed = 0;
  uint32_t rank = 0;
  uint32_t phase = 0;
};

}  // namespace cgx
