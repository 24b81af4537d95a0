// Wires by a library that carries messages between devices on its own (device/fabric.h), also
// between hosts. One lane, since the library overlaps nothing of ours with itself.
//
//   begin     the ranks agree on the host, and begin() waits for that: the library would hang, or
//             worse, on messages of other lengths than the peer's. These are the only wires whose
//             calls wait for the peers, each no longer than its timeout. Nothing is put on the
//             device before, so a rank that is late or of another mind is the call's own error
//   exchange  the library's, on the lane's queue; or on the host, if it does not wait on the device
//   watch     where it does, a thread knows the deadline of what is on the device, from when it
//             begins there, and asks the library for lost peers
//   failure   the fault word is set, so that results become NaN, and the library aborted, so that
//             the device goes on. What the call itself sees it also throws, at its end. Peers are
//             not told: their own deadlines end it there
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "device/fabric.h"
#include "device/host_link.h"
#include "device/wire.h"

namespace cgx::device {

// Collective over the ranks of `host`. Null on all of them if some rank lacks memory or the
// library, or cannot be connected; then *why says which and why.
std::unique_ptr<Wire> connect_library(const char* name,
                                      const std::function<std::unique_ptr<Fabric>()>& make_fabric,
                                      Device& device, HostLink& host,
                                      std::chrono::duration<double> timeout, std::string* why);
// The device's own library: NCCL.
std::unique_ptr<Wire> connect_nccl(Device& device, HostLink& host,
                                   std::chrono::duration<double> timeout, std::string* why);

}  // namespace cgx::device
