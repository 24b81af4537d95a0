// The communicators of the groups that mesh axes form.
//
//   LocalCommunicator          all devices of the group are in this process
//   WithProcessCommunicator    the group is in several processes
//
// Both are made at the group's first use and kept. They, and the world that they are made from, are
// the only state of the binding besides the call sites.
#ifndef CGX_XLA_FFI_GROUPS_H_
#define CGX_XLA_FFI_GROUPS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cgx/cgx.h"

namespace cgx::xla {

// Sets the communicator whose ranks are JAX's processes, before any is used. Until then it is
// cgx_init's world.
void SetWorld(int32_t comm);

// Returns the communicator of rank `rank` in the group of the given partitions, for one run of one
// program. A group whose communicator was closed by a failure gets a new one for runs that have not
// used it yet; late devices of the failed run still get the closed one, so that they fail at once
// and cannot disturb the next run. Throws StatusError.
int32_t LocalCommunicator(const std::vector<int64_t>& members, int64_t rank, int64_t run,
                          double timeout_s);

// Receives a communicator, or the reason why there is none.
using UseCommunicator =
    std::function<void(int32_t comm, cgx_status_t status, const std::string& message)>;

// Calls `use` with the communicator whose rank i is the process that is rank processes[i] of the
// world. Never blocks: making a communicator waits for the other processes, so at first `use` is
// called later and on another thread. Uses of one group are called in the order of these calls.
void WithProcessCommunicator(const std::vector<int32_t>& processes, UseCommunicator use);

// Tells the other processes that this one takes no part in its next collective of that name.
void Refuse(const std::vector<int32_t>& processes, const std::string& name, cgx_status_t status,
            const std::string& text);

}  // namespace cgx::xla

#endif  // CGX_XLA_FFI_GROUPS_H_
