// Which host this rank is on: by default the machine, else what CGX_HOST_ID says.
#pragma once

#include <array>

namespace cgx {

using Host = std::array<char, 192>;

// Ranks with equal hosts are one host's (base/topology.h).
Host this_host();

// Ranks with equal memories can share memory by process id: one host name, boot and PID namespace,
// and one host.
Host this_memory();

}  // namespace cgx
