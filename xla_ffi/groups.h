// The communicators of the groups that mesh axes form.
//
//   LocalCommunicator          all devices of the group are in this process
//   WithProcessCommunicator    the group is in several processes
//   CudaCommunicator           either, on GPUs
//
// All are created at the group's first use and kept for the life of the process. Other state of
// that lifetime: the calls in flight (launches.cc), the deadlines (rendezvous.cc), the counters of
// call sites (site.cc), and settings from Python: deadline (collective.cc), devices (cuda.cc),
// world (here).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cgx/cgx.h"

namespace cgx::xla {

// Sets the communicator whose ranks are JAX's processes, before its first use. The default is
// cgx_init's world.
void SetWorld(int32_t comm);

// Returns the communicator of rank `rank` in the group of the given members, for one run of one
// program. `kind` and members identify the group. If a failure closed the communicator, runs that
// have not used it yet get a new one. Late devices of the failed run still get the closed one, so
// that they fail immediately and cannot disturb the next run. Throws StatusError.
int32_t LocalCommunicator(const std::string& kind, const std::vector<int64_t>& members,
                          int64_t rank, int64_t run, double timeout_s);

// Receives a communicator, or the reason why there is none.
using UseCommunicator =
    std::function<void(int32_t comm, cgx_status_t status, const std::string& message)>;

// Calls `use` with the communicator whose rank i is the process that is rank processes[i] of the
// world. Never blocks: creating a communicator waits for the other processes, so at the first use
// of a group `use` is called later, on another thread. Uses of one group are called in call order.
void WithProcessCommunicator(const std::vector<int32_t>& processes, UseCommunicator use);

// GPUs that reduce together, by rank. Each rank of their communicator always uses the same GPU.
struct CudaGroup {
  std::vector<int64_t> devices;    // ids
  std::vector<int32_t> processes;  // empty: all are in this one
};

// Returns the communicator of rank `rank`. At the first use of a group, waits for the other
// processes, in bounded time. Throws StatusError.
int32_t CudaCommunicator(const CudaGroup& group, int64_t rank, int64_t run);

// Makes the run's other devices in this process fail after this one has failed: XLA aborts a
// process whose devices do not follow within 10 s. Later runs get a new communicator. Devices in
// other processes need nothing: they wait no longer than the deadline.
void Abandon(const CudaGroup& group, int64_t rank, int64_t run);

// Notifies the other processes that this one does not take part in its next collective of that
// name.
void Refuse(const std::vector<int32_t>& processes, const std::string& name, cgx_status_t status,
            const std::string& text);

}  // namespace cgx::xla
