// The device memory of this process into which peers write.
//
// It may be freed only when no peer maps it any more. Closing a communicator does not wait for its
// peers. They tell it later: ranks that connect devices announce the wires that they have closed. A
// process that has ended maps nothing.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/bytes.h"
#include "device/queue.h"
#include "transport/process.h"

namespace cgx::device {

class Windows {
 public:
  static Windows& of_process();

  // Keeps the window of a new wire. Returns the wire's number, which no other one on the host has.
  uint64_t add(Memory window);
  // Removes a wire whose window no peer maps, because the ranks did not connect.
  void withdraw(uint64_t wire);
  // Returns the message of this rank to the peers of the wire.
  Bytes announcement(uint64_t wire) const;
  // Takes the announcements of all ranks, before any of them maps this wire's window. Returns
  // memory that no peer maps, to be freed when the ranks are connected: freeing waits for the GPU.
  [[nodiscard]] std::vector<Memory> connect(uint64_t wire, std::span<const Bytes> announcements);
  // Notes that all ranks have taken them.
  void know(uint64_t wire, std::span<const Bytes> announcements);
  // The wire uses no window any more. Has no effect when repeated.
  void close(uint64_t wire);

 private:
  using Processes = std::map<pid_t, std::shared_ptr<Process>>;
  struct Window {
    Memory memory;
    bool connected = false, closed = false;
    Processes peers;                      // other processes
    std::map<uint64_t, pid_t> mapped_by;  // wires of peers

    // Until it is connected, a peer may map it without this rank's knowledge.
    bool is_free() const { return connected && closed && mapped_by.empty(); }
  };

  // Removes what ended processes map, and returns windows that can be freed.
  std::vector<Memory> unmapped();

  mutable std::mutex mutex_;
  std::map<uint64_t, Window> windows_;    // by wire
  std::map<uint64_t, Processes> closed_;  // wires, and the processes that do not know it yet
};

}  // namespace cgx::device
