// Messages of all cgx communicators of this process over MPI. They share one MPI communicator,
// because creating and freeing others would be collective calls without deadlines.
//
// Every message begins with a prefix that identifies its cgx communicator. Any thread that makes
// progress receives the messages of all communicators and puts each into the box of its
// communicator. Messages without a box are dropped: their communicator was closed here.
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
  uint64_t communicator;  // unique to the communicator, and equal on its ranks
  uint32_t kind;          // used by the transport only
  uint32_t channel;
};

struct MpiMessage {
  int sender;  // rank in the job
  uint32_t sequence;
  BlockPool::Block block;
  size_t size;  // includes the prefix

  MpiPrefix prefix() const;
  std::span<const std::byte> payload() const;
};

// Received messages of one communicator.
struct MpiBox {
  std::mutex mutex;
  std::deque<MpiMessage> messages;
  std::vector<int> dead;  // ranks in the job that MPI has reported as dead
  Doorbell bell;          // rung when a message is added
};

class MpiPost {
 public:
  static MpiPost& instance();

  // Opens the box of a communicator. Messages are received for it while its owner keeps it.
  std::shared_ptr<MpiBox> open(uint64_t communicator);

  // Makes progress without blocking. Returns immediately if another thread is making progress.
  // Throws Error(CGX_SYSTEM).
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
