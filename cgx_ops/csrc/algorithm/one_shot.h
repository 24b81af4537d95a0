#pragma once

#include <cstdint>

namespace cgx {

// Payloads up to this ride in the header, so that a small allreduce is one message each way.
inline constexpr int64_t kEagerBytes = 8 * 1024;

}  // namespace cgx
