// Wires that use a library to send messages between GPUs, also between hosts (device/fabric.h).
// There is one lane, since the library does not overlap its own operations.
//
//   begin     Ranks agree on the call on the host, and begin() waits for it: with message lengths
//             that differ between ranks the library would hang, or worse. These are the only wires
//             whose calls wait for peers, each at most for its timeout. Nothing is enqueued before,
//             so the call itself reports late ranks and mismatches.
//   exchange  The library's operation on the lane's queue, or on the host if it does not wait on
//             the device.
//   watch     If it waits on the device, a thread enforces the deadline of the running collective,
//             and polls the library for lost peers.
//   failure   Sets the fault word, so that results become NaN, and aborts the library, so that the
//             device continues. The call throws failures that it sees itself. Peers are not
//             notified: they reach their own deadlines.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "device/fabric.h"
#include "device/host_link.h"
#include "device/wire.h"

namespace cgx::device {

// Collective over the ranks of `host`. Returns null on all ranks, with the rank and the reason in
// *why, if some rank lacks memory or the library, or cannot be connected.
std::unique_ptr<Wire> connect_library(const char* name,
                                      const std::function<std::unique_ptr<Fabric>()>& make_fabric,
                                      Device& device, HostLink& host,
                                      std::chrono::duration<double> timeout, std::string* why);
// The device vendor's library: NCCL.
std::unique_ptr<Wire> connect_nccl(Device& device, HostLink& host,
                                   std::chrono::duration<double> timeout, std::string* why);

}  // namespace cgx::device
