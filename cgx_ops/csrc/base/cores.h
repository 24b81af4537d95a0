// The processor cores that this rank may use.
#pragma once

namespace cgx {

// The cores that this process is allowed to use, at most its share of the host's. At least 1.
int cores_of_rank();

// Whether this host has more ranks than cores, so that a polling rank slows others down.
bool crowded();

}  // namespace cgx
