// The wire by an MPI that takes addresses of the devices' memory ("CUDA-aware"): MPI as a library
// between devices (device/library.h). Where MPI does not say that it does, this is no wire.
//
// An exchange is the calling thread's, from its beginning to its end:
//
//   1. synchronize  what is to be sent is there, and what came before has been read
//   2. post         receives, then sends
//   3. poll         until all have ended, or it fails: at its deadline, by MPI's word, by abort()
//   4. flush        what has come is visible to what the queue gets next
//
// So no stream ever waits for MPI. One that did could wait for ever: Open MPI copies on streams
// that wait for the legacy default stream, and the caller's work may stand there, behind ours.
//
// After a failure what is pending is cancelled, within a moment; what cannot be cancelled keeps its
// memory until the process ends.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "device/host_link.h"
#include "device/wire.h"

namespace cgx::device {

// Collective over the ranks of `host`. Null on all of them if MPI is not up or does not reach some
// device's memory, with *why left empty: that is nothing to tell; or as connect_library().
std::unique_ptr<Wire> connect_mpi(Device& device, HostLink& host,
                                  std::chrono::duration<double> timeout, std::string* why);

}  // namespace cgx::device
