// Checks of what callers of the C functions give: the text names the argument, says what it is and
// what it may be. All throw Error(CGX_INVALID_ARGUMENT).
#pragma once

#include <cstdint>

#include "base/status.h"

namespace cgx {

// Elements of one call, over all its segments and ranks. Encoded they take 9 bytes each at most
// (buckets of one element), so no count of bytes exceeds 63 bits.
inline constexpr int64_t kMostElements = int64_t{1} << 59;
inline constexpr const char* kCountsAccepted = "0 to 2^59";

template <typename T = int64_t>
T in_range(const char* what, int64_t value, int64_t lowest, int64_t highest, const char* accepted) {
  require(value >= lowest && value <= highest, CGX_INVALID_ARGUMENT, what, " is ", value,
          "; accepted: ", accepted);
  return static_cast<T>(value);
}

// `count`: of what is at the pointer, which may be null only if that is nothing.
inline void check_pointer(const void* pointer, int64_t count, const char* what,
                          const char* unit = "elements") {
  require(pointer || count == 0, CGX_INVALID_ARGUMENT, what, " is a null pointer; it holds ", count,
          " ", unit);
}

// `longest`: bytes of the longest of `count` messages that lie `stride` bytes apart.
inline void check_stride(int64_t stride, int64_t longest, int64_t count) {
  require(stride >= longest && stride <= INT64_MAX / count, CGX_INVALID_ARGUMENT, "stride is ",
          stride, "; the longest of ", count, " messages has ", longest, " bytes");
}

}  // namespace cgx
