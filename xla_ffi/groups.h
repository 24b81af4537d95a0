// The communicators of the groups that mesh axes form.
//
//   LocalCommunicator          all devices of the group are in this process
//   WithProcessCommunicator    the group is in several processes
//   CudaCommunicator           either, on GPUs
//
// All are made at the group's first use and kept, for the life of the process. So are, elsewhere:
// the calls in flight (launches.cc), the deadlines of meetings (meeting.cc), the counters of call
// sites (site.cc), and what Python sets once: deadline (collective.cc), devices (cuda.cc), world
// (here).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cgx/cgx.h"

namespace cgx::xla {

// Sets the communicator whose ranks are JAX's processes, before any is used. Until then it is
// cgx_init's world.
void SetWorld(int32_t comm);

// Returns the communicator of rank `rank` in the group of the given members, for one run of one
// program. `kind` and members name the group. A group whose communicator was closed by a failure
// gets a new one for runs that have not used it yet; late devices of the failed run still get the
// closed one, so that they fail at once and cannot disturb the next run. Throws StatusError.
int32_t LocalCommunicator(const std::string& kind, const std::vector<int64_t>& members,
                          int64_t rank, int64_t run, double timeout_s);

// Receives a communicator, or the reason why there is none.
using UseCommunicator =
    std::function<void(int32_t comm, cgx_status_t status, const std::string& message)>;

// Calls `use` with the communicator whose rank i is the process that is rank processes[i] of the
// world. Never blocks: making a communicator waits for the other processes, so at first `use` is
// called later and on another thread. Uses of one group are called in the order of these calls.
void WithProcessCommunicator(const std::vector<int32_t>& processes, UseCommunicator use);

// GPUs that reduce together, by rank. Each rank of their communicator keeps to its GPU.
struct CudaGroup {
  std::vector<int64_t> devices;    // ids
  std::vector<int32_t> processes;  // empty: all are in this one
};

// Returns the communicator of rank `rank`. Waits for the other processes if it is the first of the
// group, in bounded time. Throws StatusError.
int32_t CudaCommunicator(const CudaGroup& group, int64_t rank, int64_t run);

// Has the run's other devices in this process fail, since this one has: XLA aborts a process whose
// devices don't follow within 10 s. Runs that come later get a new communicator. Nothing is to be
// done for devices in other processes: they wait no longer than the deadline.
void Abandon(const CudaGroup& group, int64_t rank, int64_t run);

// Tells the other processes that this one takes no part in its next collective of that name.
void Refuse(const std::vector<int32_t>& processes, const std::string& name, cgx_status_t status,
            const std::string& text);

}  // namespace cgx::xla
