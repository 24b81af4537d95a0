// Identifies the host of this rank: the machine, or CGX_HOST_ID if it is set.
#pragma once

#include <array>
#include <cstdint>

namespace cgx {

using Host = std::array<char, 192>;

// Ranks with equal values are on one host (base/topology.h).
Host this_host();

// Ranks with equal values can share memory by process id: they have one host name, boot, PID
// namespace and CGX_HOST_ID.
Host this_memory();
// A hash of it, for messages that have no room for the names.
uint64_t this_memory_number();

}  // namespace cgx
