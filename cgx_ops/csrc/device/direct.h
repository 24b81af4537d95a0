// The wire between GPUs that can access each other's memory: ranks of one host, over NVLink, PCIe
// or on one GPU. Every rank has a window with two slots and two mailboxes per peer. Encoders write
// directly into the peers' windows, and an exchange is one small kernel (launches.h, Signals).
// After the first call the host is not involved.
//
//   window: mailboxes, by region and sender | region 0: slots by sender | region 1
#pragma once

#include <memory>
#include <string>

#include "device/host_link.h"
#include "device/wire.h"

namespace cgx::device {

// Collective over the ranks of `host`. Returns null on all ranks, with the rank and the reason in
// *why, if some GPU cannot access another.
std::unique_ptr<Wire> connect_direct(Device& device, HostLink& host,
                                     std::chrono::duration<double> timeout, std::string* why);

}  // namespace cgx::device
