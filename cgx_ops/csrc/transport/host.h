// Identifies the host of this rank: the machine, or CGX_HOST_ID if it is set.
#pragma once

#include <array>

namespace cgx {

using Host = std::array<char, 192>;

// Ranks with equal values are on one host (base/topology.h).
Host this_host();

// Ranks with equal values can share memory by process id: they have one host name, boot, PID
// namespace and CGX_HOST_ID.
Host this_memory();

}  // namespace cgx
