// The stages in which values are sent. Each may have its own codec.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace cgx {

// Its number is also the phase of the noise (docs/reference/wire_format.md, section 4).
enum class Stage : uint32_t {
  kScatter = 0,  // a rank's own values, or partial sums, to the owner
  kGather = 1,   // reduced values, from the owner
  kIntra = 2,    // a rank's own values, within its host (hierarchical)
};

template <typename T>
struct PerStage {
  std::array<T, 3> each;
  T& operator[](Stage stage) { return each[static_cast<size_t>(stage)]; }
  const T& operator[](Stage stage) const { return each[static_cast<size_t>(stage)]; }
};

}  // namespace cgx
