// A library that sends messages between GPUs in stream order: NCCL or MPI. Its waits on the device
// have no deadline, so the caller watches them and aborts (device/library.h).
#pragma once

#include <chrono>
#include <cstddef>
#include <span>

#include "device/queue.h"

namespace cgx::device {

// One rank's endpoint. Functions throw Error: CGX_TIMEOUT, CGX_PEER_FAILED or CGX_SYSTEM. After
// that only abort() may be called. abort() and check() may run concurrently with the other
// functions.
class Fabric {
 public:
  using Seconds = std::chrono::duration<double>;
  struct Message {
    int peer;
    Memory at;  // on the device; read if sent, written if received
    size_t bytes;
  };

  virtual ~Fabric() = default;  // aborts unless closed
  // Makes the argument of connect(). One rank calls it and sends the result to all.
  virtual Bytes make_id() = 0;
  // Must be the first call. Collective over the ranks, each with its own device.
  virtual void connect(int rank, int size, const Bytes& id, Seconds timeout) = 0;
  // Whether exchange() makes the queue wait for peers on the device. If not, it waits itself, at
  // most for the timeout, and leaves nothing on the device.
  virtual bool waits_on_device() const { return true; }
  // Sends and receives all messages as one operation, in queue order. Both ends use equal lengths,
  // which are not 0. May wait for peers, at most for the timeout. The implementation keeps the
  // memory of messages that may be accessed after an abort.
  virtual void exchange(std::span<const Message> outgoing, std::span<const Message> incoming,
                        Queue& queue, Seconds timeout) = 0;
  // Throws a failure that is known by now.
  virtual void check() = 0;
  // Ends all operations on the device, and exchange(). Results are unspecified.
  virtual void abort() = 0;
  // Call it after all work on the queues has ended. Waits until the peers' work has ended, too.
  virtual void close(Seconds timeout) = 0;
};

}  // namespace cgx::device
