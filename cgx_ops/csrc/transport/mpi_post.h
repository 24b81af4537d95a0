// The messages of all of this process's communicators over MPI. They share one communicator of MPI:
// making one for each would be a collective call, which has no deadline, and freeing it another.
//
// Every message begins with a prefix that names its cgx communicator. Whoever makes progress takes
// in what has come for any of them, and puts it into the box that the prefix names; what is for
// none (its communicator was closed here) is dropped.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <vector>

#include "transport/block_pool.h"
#include "transport/doorbell.h"

namespace cgx {

struct MpiPrefix {
  uint64_t communicator;  // equal on its ranks, and no other's
  uint32_t kind;          // the transport's own
  uint32_t channel;
};

struct MpiMessage {
  int sender;  // rank in the job
  uint32_t sequence;
  BlockPool::Block block;
  size_t size;  // with the prefix

  MpiPrefix prefix() const;
  std::span<const std::byte> payload() const;
};

// What has come for one communicator.
struct MpiBox {
  std::mutex mutex;
  std::deque<MpiMessage> messages;
  std::vector<int> dead;  // ranks in the job whose end MPI has told
  Doorbell bell;          // rung when something is put in
};

class MpiPost {
 public:
  static MpiPost& instance();

  // The box is open as long as its owner keeps it. Messages for it are put in from now on.
  std::shared_ptr<MpiBox> open(uint64_t communicator);

  // Moves what can be moved without waiting. If another thread does, that is enough. Throws
  // Error(CGX_SYSTEM).
  void progress();

  BlockPool& blocks() { return blocks_; }

 private:
  struct Incoming {
    MpiMessage message;
    MPI_Request request;
  };

  void probe();
  void deliver();
  void put(MpiMessage message);
  bool learn_of_deaths();
  std::shared_ptr<MpiBox> box(uint64_t communicator);

  std::mutex progressing_;
  std::list<Incoming> receiving_;  // in the order of arrival
  BlockPool blocks_;

  std::mutex boxes_mutex_;
  std::map<uint64_t, std::weak_ptr<MpiBox>> boxes_;
  std::set<int> dead_;
};

}  // namespace cgx
