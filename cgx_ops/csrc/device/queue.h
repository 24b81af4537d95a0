// A device, and work in order on it: what the layers above need of CUDA, and no more, so that they
// are tested with threads for devices (tests/cpp/fake_device.h).
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

// A stream. Nothing here blocks; everything runs after what was put before. May throw Error
// (CGX_SYSTEM) when the device refuses.
class Queue {
 public:
  virtual ~Queue() = default;
  virtual void encode(const Encode& launch) = 0;
  virtual void reduce(const Reduce& launch) = 0;
  virtual void decode(const Decode& launch) = 0;
  virtual void signal(const Signals& launch) = 0;
  // Between any two of the device's and pinned memory.
  virtual void copy(void* to, const void* from, size_t bytes) = 0;
  virtual void clear(void* at, size_t bytes) = 0;  // zeros
  // Calls work(context) on some thread of the host, which must neither block nor use the device.
  virtual void call(void (*work)(void* context), void* context) = 0;
  // Until the word, in pinned memory, is at least `value`: the host writes it.
  virtual void wait_for(const uint32_t* word, uint32_t value) = 0;
  // What is put from now on waits for what is in `other` now.
  virtual void follow(Queue& other) = 0;
  // Has everything that was put so far ended? Never waits.
  virtual bool idle() = 0;
  virtual void synchronize() = 0;  // blocks until idle()
};

enum class Place {
  kDevice,
  kPinned,  // host memory at one address for host and device
};

// Freed with its last owner, who must know that no queue uses it any more.
using Memory = std::shared_ptr<std::byte>;

// What a caller knows a buffer by, for error messages: "input", or "inputs[3]". No text before it
// is needed: a call checks every buffer.
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
  virtual std::string name() const = 0;
  virtual std::unique_ptr<Queue> make_queue() = 0;
  // The caller's own stream: not destroyed.
  virtual std::unique_ptr<Queue> wrap(void* stream) = 0;
  // Whether what is put on the stream is recorded into a graph rather than run.
  virtual bool recording(void* stream) = 0;
  // Blocks until everything on the device has ended, whoever put it there.
  virtual void synchronize() = 0;
  // Zeroed. Throws Error(CGX_SYSTEM): how much of what was asked for, what is free, the remedy.
  virtual Memory allocate(size_t bytes, Place place) = 0;
  // Memory of kDevice, for another rank: in this process or another one, on this device or another.
  // At most 128 bytes.
  virtual Bytes share(const Memory& memory) = 0;
  // A peer's memory. Throws Error(CGX_SYSTEM) and says why: handles cannot be opened (containers),
  // no peer access, another host.
  virtual Memory open(const Bytes& shared) = 0;
  // Of the device's own library, for one communicator. Throws Error(CGX_SYSTEM) and says why: there
  // is no such library.
  virtual std::unique_ptr<Fabric> make_fabric() = 0;
  // Whether MPI says that it takes addresses of this device's memory.
  virtual bool reached_by_mpi() = 0;
  // The calling thread's current device while the result lives, for libraries that use that.
  [[nodiscard]] virtual std::shared_ptr<void> make_current() = 0;
  // Makes what others, such as network cards, have written to this device's memory visible to what
  // its queues get next. On a thread where the device is current.
  virtual void flush_remote_writes() = 0;
  // Throws Error(CGX_INVALID_ARGUMENT) unless the device can use memory at this address.
  virtual void check_address(const void* address, const BufferName& what) = 0;
};

// The device whose memory is at the address; null: the calling thread's current one. Throws Error:
// not a device's memory (the remedy), no driver, or built without CUDA.
Device& device_of(const void* address);
// For `info`, as a JSON object: built or not and with which toolkit, driver, devices. Starts
// nothing that was not started.
std::string describe_devices();

}  // namespace cgx::device
