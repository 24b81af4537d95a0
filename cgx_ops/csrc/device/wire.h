// A wire carries messages between the devices of a communicator's ranks. It knows no dtype and no
// algorithm: they write messages into slots, one for each rank, and have them exchanged.
//
//   direct   slots are in the peers' own memory: an exchange only tells that they are written
//   staged   the communicator's transport between CPUs carries them through pinned memory
//   mpi      MPI carries them from device to device, where it takes devices' addresses
//   nccl     NCCL does (both: device/library.h)
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
  kEach,  // every peer gets a message of its own
  kAll,   // all ranks get the same, the sender too
};

// Where the messages of the next exchange lie.
struct Slots {
  std::vector<std::byte*>
      to;           // by rank: where this rank writes; equal where one copy serves several
  std::byte* from;  // where rank 0's message will be; the others' are `stride` apart
  int64_t stride;
};

// Bytes of each of `slots` slots: at most `most`, and no more than `all` together.
inline constexpr int64_t kSlotAlignment = 256;
inline int64_t slot_bytes_for(int64_t most, int64_t all, int64_t slots) {
  return std::min(most, all / slots / kSlotAlignment * kSlotAlignment);
}

// A round on its way: a queue, and slots that no other round uses meanwhile.
class Lane {
 public:
  virtual ~Lane() = default;
  virtual Queue& queue() = 0;
  virtual const uint32_t* fault() const = 0;  // a word on the device: launches.h
  virtual Slots slots(Traffic traffic) = 0;
  // What the queue has written to slots(traffic).to is where the receivers read it, for what they
  // put on their queue after this. Lengths in bytes, by rank; both ends know them.
  virtual void exchange(Traffic traffic, std::span<const int64_t> sent,
                        std::span<const int64_t> received) = 0;
};

// A collective as the wire sees it.
struct Call {
  Agreement agreement;  // equal on all ranks, or the exchange fails
  uint64_t number = 0;  // of the communicator's device collectives
  std::string name;     // for error texts
  std::chrono::duration<double> timeout{0};
};

// How error texts call a collective: "'name' (number 7)", "number 7".
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
  virtual bool recordable() const = 0;  // into a CUDA graph
  virtual Regions regions() const = 0;

  // A collective, whose results `caller` waits for from end() on. May wait for the ranks to agree
  // on it, no longer than its timeout; then what they do not agree on is thrown here.
  virtual void begin(const Call& call, Queue& caller) = 0;
  virtual Lane& lane(int64_t round) = 0;
  // Throws what exchanges have failed with, once what writes NaN is on the way.
  virtual void end(Queue& caller) = 0;
  // This rank cannot go on: puts on the caller's queue what tells peers, if anything can.
  virtual void give_up(Queue& /*caller*/) {}

  // What went wrong first, on this rank, as far as is known now.
  virtual std::optional<Failure> failure() = 0;
  // Everything on its queues has ended. Tells peers where the library has a way, and waits for them
  // no longer than at_most; lets go of shared memory.
  virtual void close(std::chrono::duration<double> at_most) = 0;
};

}  // namespace cgx::device
