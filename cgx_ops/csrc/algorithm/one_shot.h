#pragma once

#include <cstdint>

namespace cgx {

// Payloads up to this size are sent in the header, so that a small allreduce needs one message per
// peer.
inline constexpr int64_t kEagerBytes = 8 * 1024;

}  // namespace cgx
