// The wire between GPUs that cannot access each other's memory. Messages are copied to pinned
// memory, sent by the communicator's transport (algorithm/relay.h), and copied to the other GPU.
// Only encoded bytes cross PCIe.
//
// Rounds use three lanes in turn, each with its own queue and slots, so that one encodes while the
// messages of others are copied and sent. A round is enqueued completely in advance: the device
// calls the host to start a relay, and waits for a word in pinned memory that the host writes at
// its end. So no caller blocks, and no host thread uses the device.
#pragma once

#include <memory>
#include <string>

#include "device/host_link.h"
#include "device/wire.h"

namespace cgx::device {

// Collective over the ranks of `host`. Returns null on all ranks if some rank lacks memory.
std::unique_ptr<Wire> connect_staged(Device& device, HostLink& host,
                                     std::chrono::duration<double> timeout, std::string* why);

}  // namespace cgx::device
