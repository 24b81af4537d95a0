// Messages by MPI between addresses, which may be those of a GPU's memory where MPI takes them
// (mpi_cuda_aware): nothing is copied here, or read.
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

  MpiMessages();
  ~MpiMessages();  // none is pending
  MpiMessages(const MpiMessages&) = delete;
  MpiMessages& operator=(const MpiMessages&) = delete;

  // For the peers; empty if MPI is not up.
  Bytes address() const;
  // Whether messages can go between these: processes of one MPI job, none of them twice. All ranks
  // decide alike from the same addresses, in rank order.
  static bool can_connect(const std::vector<Bytes>& addresses);
  void connect(const std::vector<Bytes>& addresses);

  // Messages between two ranks are received in the order of their sends; both know the lengths. A
  // send ends when the peer has the message.
  void send(int peer, Memory from, size_t bytes);
  void receive(int peer, Memory to, size_t bytes);
  bool pending() const { return pending_ > 0; }
  std::set<int> pending_peers() const;
  // Moves what can be moved without waiting; returns whether any message has ended.
  bool progress();
  // The last call: cancels what is pending, no longer than `at_most`. The memory of what cannot be
  // cancelled is kept until the process ends.
  void abandon(std::chrono::duration<double> at_most);

 private:
  struct Sets;  // in MPI's types
  struct Peer {
    int rank;  // in the job
    int tag;   // of messages to it
  };

  void require_success(int code, int peer) const;

  const int tag_;  // of messages to this rank
  std::vector<Peer> peers_;
  std::unique_ptr<Sets> sets_;
  int pending_ = 0;
};

}  // namespace cgx
