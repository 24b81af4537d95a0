// Creating communicators.
//
//   connect        from a bootstrap: exchanges offers and tries the transports in order of
//                  preference, until one connects all ranks
//   connect_local  ranks that are threads of this process
//   split, group   by color, or from a list of ranks; the parent serves as the bootstrap
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "communicator.h"

namespace cgx {

// Returns all ranks' blobs, which have equal sizes, in rank order.
using Allgather = std::function<std::vector<Bytes>(const Bytes& mine)>;

// Collective over the bootstrap's ranks. `type`: one of communicator_types(), equal on all ranks.
// noise_rank: as in Plan. `elastic`: only by transports that connect the survivors of a lost
// process. `at_most`: limit for connecting; 0: the timeout.
CommunicatorRef connect(const std::string& name, int rank, int noise_rank, int size,
                        const Allgather& allgather, const std::string& type,
                        Communicator::Seconds timeout, bool elastic = false,
                        Communicator::Seconds at_most = Communicator::Seconds(0));
// host_of, by rank, simulates several hosts with threads. `type` affects GPUs only.
std::vector<CommunicatorRef> connect_local(const std::string& name, std::vector<int> host_of,
                                           Communicator::Seconds timeout,
                                           const std::string& type = "AUTO");
// Ranks keep the noise ranks that they have in the parent. split() returns nullptr for a negative
// color.
CommunicatorRef split(Communicator& parent, int color, int key, const std::string& name);
CommunicatorRef group(Communicator& parent, const std::vector<int>& ranks, const std::string& name);

}  // namespace cgx
