// The wire between devices that reach each other's memory: ranks of one host, over NVLink, PCIe or
// on one GPU. Every rank has a window, in which each peer has two slots and two mailboxes; encoders
// write straight into the peers' windows, and an exchange is one small kernel (launches.h,
// Signals). After the first call nothing goes through the host.
//
//   window: mailboxes, by region and sender | region 0: slots by sender | region 1
#pragma once

#include <memory>
#include <string>

#include "device/host_link.h"
#include "device/wire.h"

namespace cgx::device {

// Collective over the ranks of `host`. Null on all of them if some device cannot reach another;
// then *why says which and why.
std::unique_ptr<Wire> connect_direct(Device& device, HostLink& host,
                                     std::chrono::duration<double> timeout, std::string* why);

}  // namespace cgx::device
