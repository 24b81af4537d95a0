// A wire sends messages between the GPUs of a communicator's ranks. It does not depend on dtypes or
// algorithms: these write messages into slots, one per rank, and call exchange().
//
//   direct   Slots are in the peers' memory, so an exchange only signals that they are written.
//   staged   The communicator's CPU transport sends them through pinned memory.
//   mpi      A CUDA-aware MPI sends them from GPU to GPU (device/library.h).
//   nccl     NCCL sends them from GPU to GPU (device/library.h).
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "device/queue.h"
#include "plan.h"

namespace cgx::device {

enum class Traffic {
  kEach,  // every peer gets a different message
  kAll,   // all ranks get the same message, including the sender
};

// The addresses of the messages of the next exchange.
struct Slots {
  std::vector<std::byte*> to;  // per rank: where this rank writes; equal addresses mean one copy
                               // for several ranks
  std::byte* from;  // where rank 0's message arrives; the others follow at distances of `stride`
  int64_t stride;
};

// The size of each of `slots` slots in bytes: at most `most`, and `all` in total.
inline constexpr int64_t kSlotAlignment = 256;
inline int64_t slot_bytes_for(int64_t most, int64_t all, int64_t slots) {
  return std::min(most, all / slots / kSlotAlignment * kSlotAlignment);
}

// A round in progress: a queue, and slots that no other round uses at the same time.
class Lane {
 public:
  virtual ~Lane() = default;
  virtual Queue& queue() = 0;
  virtual const uint32_t* fault() const = 0;  // a word on the device: launches.h
  virtual Slots slots(Traffic traffic) = 0;
  // Sends the data that the queue has written to slots(traffic).to, so that later work of the
  // receivers' queues can read it. Sizes in bytes, per rank; both ends use equal ones.
  virtual void exchange(Traffic traffic, std::span<const int64_t> sent,
                        std::span<const int64_t> received) = 0;
};

// A collective as the wire sees it.
struct Call {
  Agreement agreement;  // must be equal on all ranks
  uint64_t number = 0;  // number of the communicator's GPU collective
  std::string name;     // for error texts
  std::chrono::duration<double> timeout{0};
};

// Names a collective in error texts: "'name' (number 7)", "number 7".
inline std::string title_of(const std::string& name, uint64_t number) {
  return name.empty() ? join("number ", number) : join("'", name, "' (number ", number, ")");
}

struct Failure {
  cgx_status_t status;
  std::string text;
};

class Wire {
 public:
  virtual ~Wire() = default;
  virtual const char* name() const = 0;
  virtual int64_t slot_bytes() const = 0;
  virtual bool recordable() const = 0;  // supports capture in a CUDA graph
  virtual Regions regions() const = 0;

  // Begins a collective. After end(), `caller` waits for its results. May wait for ranks to agree
  // on the call, at most for its timeout, and throws if they do not.
  virtual void begin(const Call& call, Queue& caller) = 0;
  virtual Lane& lane(int64_t round) = 0;
  // Throws the failure of an exchange, after enqueuing the writes of NaN.
  virtual void end(Queue& caller) = 0;
  // This rank cannot continue: enqueues a notification to the peers, if the wire supports it.
  virtual void give_up(Queue& /*caller*/) {}

  // The first failure on this rank that is known by now.
  virtual std::optional<Failure> failure() = 0;
  // Called after all work on its queues has ended. Notifies peers if the library supports it, and
  // waits for them at most for at_most. Releases shared memory.
  virtual void close(std::chrono::duration<double> at_most) = 0;
};

}  // namespace cgx::device
