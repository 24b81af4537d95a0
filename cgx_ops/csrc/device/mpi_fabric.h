// The wire that uses a CUDA-aware MPI, which accepts addresses in GPU memory (device/library.h).
// Not available if MPI does not report that it is CUDA-aware.
//
// The calling thread runs an exchange from beginning to end:
//
//   1. Synchronize: wait until the data to be sent is complete and earlier data has been read.
//   2. Post the receives, then the sends.
//   3. Poll until all have ended, or until a failure: the deadline, an MPI error, or abort().
//   4. Flush: make received data visible to later work on the queue.
//
// So no stream waits for MPI. Otherwise it could deadlock: Open MPI copies on streams that wait for
// the legacy default stream, on which the caller's work may wait for ours.
//
// After a failure, pending messages are cancelled quickly. The memory of messages that cannot be
// cancelled is leaked.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "device/host_link.h"
#include "device/wire.h"

namespace cgx::device {

// Collective over the ranks of `host`. Returns null on all ranks, with an empty *why, if MPI is not
// initialized or cannot access some GPU's memory; otherwise as connect_library().
std::unique_ptr<Wire> connect_mpi(Device& device, HostLink& host,
                                  std::chrono::duration<double> timeout, std::string* why);

}  // namespace cgx::device
