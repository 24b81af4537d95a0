// Checks of arguments of the C API. The error text names the argument, its value and the accepted
// values. All throw Error(CGX_INVALID_ARGUMENT).
#pragma once

#include <cstdint>

#include "base/status.h"

namespace cgx {

// The limit on the elements of a call, over all segments and ranks. They take at most 9 bytes each
// when encoded (buckets of one element), so no size in bytes overflows 63 bits.
inline constexpr int64_t kMostElements = int64_t{1} << 59;
inline constexpr const char* kCountsAccepted = "0 to 2^59";

template <typename T = int64_t>
T in_range(const char* what, int64_t value, int64_t lowest, int64_t highest, const char* accepted) {
  require(value >= lowest && value <= highest, CGX_INVALID_ARGUMENT, what, " is ", value,
          "; accepted: ", accepted);
  return static_cast<T>(value);
}

// Checks a pointer to `count` items. It may be null only if `count` is 0.
inline void check_pointer(const void* pointer, int64_t count, const char* what,
                          const char* unit = "elements") {
  require(pointer || count == 0, CGX_INVALID_ARGUMENT, what, " is a null pointer; it holds ", count,
          " ", unit);
}

// `longest`: size of the longest of `count` messages, which are `stride` bytes apart.
inline void check_stride(int64_t stride, int64_t longest, int64_t count) {
  require(stride >= longest && stride <= INT64_MAX / count, CGX_INVALID_ARGUMENT, "stride is ",
          stride, ", but the longest of ", count, " messages has ", longest, " bytes");
}

}  // namespace cgx
