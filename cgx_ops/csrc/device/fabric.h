// A library that moves messages between devices, in the order of a queue: NCCL, or MPI. Where it
// waits on the device, that has no deadline: whoever uses it watches it, and aborts
// (device/library.h).
#pragma once

#include <chrono>
#include <cstddef>
#include <span>

#include "device/queue.h"

namespace cgx::device {

// One rank's end. Functions throw Error: CGX_TIMEOUT, CGX_PEER_FAILED, CGX_SYSTEM; abort() alone is
// of use then. It and check() may be called while other threads call the others.
class Fabric {
 public:
  using Seconds = std::chrono::duration<double>;
  struct Message {
    int peer;
    Memory at;  // on the device; read if it is sent, written if it is received
    size_t bytes;
  };

  virtual ~Fabric() = default;  // aborts unless closed
  // What connect() must be given on all ranks: made by one of them.
  virtual Bytes make_id() = 0;
  // Once, first. Collective over the ranks, each with a device of its own.
  virtual void connect(int rank, int size, const Bytes& id, Seconds timeout) = 0;
  // Whether what exchange() puts on the queue waits there for peers. If not, it waits for them
  // itself, no longer than the timeout, and nothing is left on the device.
  virtual bool waits_on_device() const { return true; }
  // Moves all messages as one operation, after what is on the queue and before what is put there
  // next; both ends know the lengths, none of which is 0. Who may still use a message's memory
  // after an abort keeps it. May wait for peers, no longer than the timeout.
  virtual void exchange(std::span<const Message> outgoing, std::span<const Message> incoming,
                        Queue& queue, Seconds timeout) = 0;
  // Throws what has failed since, as far as is known now.
  virtual void check() = 0;
  // What is on the device ends, wherever it is, and so does exchange(); results are undefined.
  virtual void abort() = 0;
  // Once all that was put on queues has ended: waits for the peers to do so too.
  virtual void close(Seconds timeout) = 0;
};

}  // namespace cgx::device
