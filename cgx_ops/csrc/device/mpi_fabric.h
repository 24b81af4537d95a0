// The wire by an MPI that takes addresses of the devices' memory ("CUDA-aware"): MPI as a library
// between devices (device/library.h). Where MPI does not say that it does, this is no wire.
//
//   exchange   the queue calls the host, which hands the messages to a thread, and waits for a word
//   thread     all of MPI's calls for this communicator: it posts the messages, tests them until
//   all
//              have ended, and counts the word up. Exchanges come one after another
//   abort      the word is counted up at once for all that is on the queue; the thread cancels what
//              is pending, and what it cannot cancel keeps its memory until the process ends
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
