// Messages by MPI between addresses, which may be those of a GPU's memory where MPI takes them
// (Mpi::cuda_aware): nothing is copied here, or read.
//
// They go over the job's own communicator, so that connecting any of its ranks takes no collective
// call of MPI, which would have no deadline: each process gives its peers a tag, and messages to it
// carry that. A message goes as it is: MPI cuts long ones as it sees fit for the memory.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <set>
#include <vector>

#include "transport/transport.h"  // Bytes

namespace cgx {

// One rank's end, for one thread at a time. Throws Error: CGX_PEER_FAILED if MPI knows that a
// process has died (mpirun --with-ft ulfm), else CGX_SYSTEM.
class MpiMessages {
 public:
  using Memory = std::shared_ptr<std::byte>;  // kept for as long as MPI may use it

  virtual ~MpiMessages() = default;  // none is pending

  // For the peers; empty if MPI is not up.
  virtual Bytes address() const = 0;
  // Whether messages can go between these: processes of one MPI job, none of them twice. The result
  // is the same on all ranks, since all have the same addresses, in rank order.
  virtual bool connect(const std::vector<Bytes>& addresses) = 0;

  // Messages between two ranks are received in the order of their sends; both know the lengths. A
  // send ends when the peer has the message.
  virtual void send(int peer, Memory from, size_t bytes) = 0;
  virtual void receive(int peer, Memory to, size_t bytes) = 0;
  virtual bool pending() const = 0;
  virtual std::set<int> pending_peers() const = 0;
  // Moves what can be moved without waiting; returns whether any message has ended.
  virtual bool progress() = 0;
  // The last call: cancels what is pending, no longer than `at_most`. The memory of what cannot be
  // cancelled is kept until the process ends.
  virtual void abandon(std::chrono::duration<double> at_most) = 0;
};

}  // namespace cgx
