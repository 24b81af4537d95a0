// The device interface: the part of CUDA that the layers above need. Tests replace it by threads
// (tests/cpp/fake_device.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>

#include "kernel/cuda/launches.h"
#include "transport/transport.h"  // Bytes

namespace cgx::device {

class Fabric;  // device/fabric.h

// A point in the work of a queue that other queues wait for. May be recorded again and again.
class Event {
 public:
  virtual ~Event() = default;
  virtual void synchronize() = 0;  // blocks until it is reached
};

// A stream. Functions do not block, and operations run in order. They may throw Error(CGX_SYSTEM).
class Queue {
 public:
  virtual ~Queue() = default;
  virtual void encode(const Encode& launch) = 0;
  virtual void reduce(const Reduce& launch) = 0;
  virtual void decode(const Decode& launch) = 0;
  virtual void signal(const Signals& launch) = 0;
  // Copies between device and pinned memory.
  virtual void copy(void* to, const void* from, size_t bytes) = 0;
  virtual void clear(void* at, size_t bytes) = 0;  // fills with zeros
  // Calls work(context) on a host thread. It must not block or use the device.
  virtual void call(void (*work)(void* context), void* context) = 0;
  // Waits until the word, in pinned memory, is at least `value`. The host writes it.
  virtual void wait_for(const uint32_t* word, uint32_t value) = 0;
  // Makes `event` the end of the current work of this queue.
  virtual void record(Event& event) = 0;
  // Makes later work wait for the event as it was last recorded. Does nothing if it never was.
  virtual void wait_for(const Event& event) = 0;
  // Whether all work has ended. Never waits.
  virtual bool idle() = 0;
  virtual void synchronize() = 0;  // blocks until idle()
};

enum class Place {
  kDevice,
  kPinned,  // host memory with one address for host and device
};

// Freed with its last owner, who must ensure that no queue uses it.
using Memory = std::shared_ptr<std::byte>;

// The name of a buffer for error messages: "input", or "inputs[3]". Formatted only on failure,
// because a call checks every buffer.
struct BufferName {
  const char* name;
  int64_t index = -1;
};
inline std::ostream& operator<<(std::ostream& out, const BufferName& buffer) {
  out << buffer.name;
  return buffer.index < 0 ? out : out << '[' << buffer.index << ']';
}

class Device {
 public:
  virtual ~Device() = default;
  // "cuda:0".
  virtual const std::string& name() const = 0;
  virtual std::unique_ptr<Queue> make_queue() = 0;
  virtual std::unique_ptr<Event> make_event() = 0;
  // Wraps the caller's stream, which is not destroyed.
  virtual std::unique_ptr<Queue> wrap(void* stream) = 0;
  // Whether the stream is capturing a graph.
  virtual bool recording(void* stream) = 0;
  // Blocks until all work on the device has ended, of all its users.
  virtual void synchronize() = 0;
  // Zeroed memory. Throws Error(CGX_SYSTEM) with the requested and free sizes, and the remedy.
  virtual Memory allocate(size_t bytes, Place place) = 0;
  // Describes kDevice memory for another rank, in this process or another one, on this device or
  // another. At most 128 bytes.
  virtual Bytes share(const Memory& memory) = 0;
  // Opens a peer's memory. Throws Error(CGX_SYSTEM) with the reason: handles cannot be opened
  // (containers), no peer access, another host.
  virtual Memory open(const Bytes& shared) = 0;
  // Makes an endpoint of the vendor's library for one communicator. Throws Error(CGX_SYSTEM) if
  // there is no library.
  virtual std::unique_ptr<Fabric> make_fabric() = 0;
  // Whether MPI reports that it can access this device's memory.
  virtual bool reached_by_mpi() = 0;
  // Makes this the thread's current device while the result exists, for libraries that depend on
  // it. Other functions do so themselves, which costs nothing while the result exists.
  [[nodiscard]] virtual std::shared_ptr<void> make_current() = 0;
  // Makes writes of other devices, such as network cards, to this device's memory visible to later
  // work on its queues. The device must be current.
  virtual void flush_remote_writes() = 0;
  // Throws Error(CGX_INVALID_ARGUMENT) unless the device can access memory at this address.
  virtual void check_address(const void* address, const BufferName& what) = 0;
};

// The device whose memory is at the address; null: the thread's current one. Throws Error if it is
// not device memory, there is no driver, or the build has no CUDA.
Device& device_of(const void* address);
// A JSON object for `info`: toolkit of the build, driver, devices. Starts no device.
std::string describe_devices();

}  // namespace cgx::device
