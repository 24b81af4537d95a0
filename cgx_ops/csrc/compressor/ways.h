// The ways that values travel: each may have a codec of its own.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace cgx {

// What travels. Its number is the noise's phase (docs/reference/wire_format.md).
enum class Way : uint32_t {
  kScatter = 0,  // a rank's own values, or partial sums, on their way to the owner
  kGather = 1,   // reduced values, on their way back
  kIntra = 2,    // a rank's own values, within its host (hierarchical)
};

template <typename T>
struct ByWay {
  std::array<T, 3> each;
  T& operator[](Way way) { return each[static_cast<size_t>(way)]; }
  const T& operator[](Way way) const { return each[static_cast<size_t>(way)]; }
};

}  // namespace cgx
