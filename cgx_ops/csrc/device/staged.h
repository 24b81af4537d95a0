// The wire between devices that do not reach each other: messages are copied to pinned memory,
// carried by the communicator's transport (algorithm/relay.h) and copied to the other device. Only
// encoded bytes cross PCIe.
//
// Rounds go on three lanes, each with a queue and slots of its own, so that one encodes while the
// messages of others are copied and sent. All of a round is put on its queue beforehand: the device
// calls the host to start a relay, and waits for a word in pinned memory that the host writes at
// its end. So nobody blocks, and no thread of the host uses the device meanwhile.
#pragma once

#include <memory>
#include <string>

#include "device/host_link.h"
#include "device/wire.h"

namespace cgx::device {

// Collective over the ranks of `host`. Null on all of them if some rank lacks memory.
std::unique_ptr<Wire> connect_staged(Device& device, HostLink& host,
                                     std::chrono::duration<double> timeout, std::string* why);

}  // namespace cgx::device
