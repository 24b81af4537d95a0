// The stages in which values are sent. Each may have its own codec.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace cgx {

// Its number is also the phase of the noise (docs/reference/wire_format.md, section 4).
enum class Way : uint32_t {
  kScatter = 0,  // a rank's own values, or partial sums, to the owner
  kGather = 1,   // reduced values, from the owner
  kIntra = 2,    // a rank's own values, within its host (hierarchical)
};

template <typename T>
struct ByWay {
  std::array<T, 3> each;
  T& operator[](Way way) { return each[static_cast<size_t>(way)]; }
  const T& operator[](Way way) const { return each[static_cast<size_t>(way)]; }
};

}  // namespace cgx
