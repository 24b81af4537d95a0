// Messages by MPI between addresses, without copies. They may be in GPU memory if MPI supports it
// (Mpi::cuda_aware).
//
// All messages use the job's communicator: creating one would be a collective MPI call without a
// deadline. Instead, each process gives its peers a tag, which messages to it carry. MPI fragments
// long messages itself.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <set>
#include <vector>

#include "transport/transport.h"  // Bytes

namespace cgx {

// One rank's endpoint. Not thread-safe. Throws Error: CGX_PEER_FAILED if MPI reports that a process
// has died (mpirun --with-ft ulfm), otherwise CGX_SYSTEM.
class MpiMessages {
 public:
  using Memory = std::shared_ptr<std::byte>;  // kept alive while MPI may use it

  virtual ~MpiMessages() = default;  // nothing may be pending

  // This rank's address, for the peers. Empty if MPI is not initialized.
  virtual Bytes address() const = 0;
  // Whether messages can be sent between these addresses: they are different processes of one MPI
  // job. The result is equal on all ranks, because all pass the same addresses, in rank order.
  virtual bool connect(const std::vector<Bytes>& addresses) = 0;

  // Messages between two ranks are received in the order of their sends. Both sides must use equal
  // lengths. A send ends when the peer has received the message.
  virtual void send(int peer, Memory from, size_t bytes) = 0;
  virtual void receive(int peer, Memory to, size_t bytes) = 0;
  virtual bool pending() const = 0;
  virtual std::set<int> pending_peers() const = 0;
  // Makes progress without blocking. Returns whether any message has ended.
  virtual bool progress() = 0;
  // Must be the last call. Cancels pending messages, at most for `at_most`. The memory of messages
  // that cannot be cancelled is leaked, because MPI may still use it.
  virtual void abandon(std::chrono::duration<double> at_most) = 0;
};

}  // namespace cgx
