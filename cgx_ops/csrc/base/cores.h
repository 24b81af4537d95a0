// The processor cores of this host that this rank may count on.
#pragma once

namespace cgx {

// Cores that this process is allowed to use, and not more than its share of the host's. At least 1.
int cores_of_rank();

// Whether this host has more ranks than cores: who waits takes a core from one that works.
bool crowded();

}  // namespace cgx
