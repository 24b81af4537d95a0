// The GPUs of a communicator's ranks, one per rank. Created by the first GPU collective, which
// tries the wires in order of preference until one connects all ranks.
//
// Collectives run one after another, in the order of the calls, whatever their streams.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "device/host_link.h"
#include "device/wire.h"
#include "plan.h"

namespace cgx::device {

class Group {
 public:
  using Seconds = std::chrono::duration<double>;

  // Collective over the ranks of `host`, bounded by the timeout. `type` as in connect(): AUTO, or
  // the type of the only wire to use. Throws Error(CGX_SYSTEM) if no wire connects the ranks.
  Group(Device& device, HostLink& host, const std::string& type, Seconds timeout);

  // Enqueues the collective on the stream. The plan's algorithm is resolved; `agreement` is the
  // call's.
  void enqueue(Plan plan, Agreement agreement, const std::string& name, Seconds timeout,
               void* stream);
  // Announces that this rank takes no part in the next call, which has splits and fails on all
  // ranks with `why`. Waits until all ranks have made it.
  void refuse(const std::string& why, Seconds timeout);
  // Throws the failure of a collective, if any is known. finish: waits for all of them first.
  void check(bool finish);
  // Call it once. Waits for work on the device, which its deadlines bound.
  void close(Seconds at_most);

  Device& device() const { return device_; }
  const char* wire() const { return wire_->name(); }

 private:
  // Waits for all work on the device, including replays of graphs.
  void finish_all();
  void break_with(const Failure& failure);  // only the first failure is kept
  void require_well();

  Device& device_;
  HostLink& host_;
  std::mutex mutex_;
  std::unique_ptr<Wire> wire_;
  // The end of the last collective. The next one waits for it, even on the same stream: a handle
  // may denote a thread's own stream, or may have been reused.
  std::unique_ptr<Event> last_end_;
  std::atomic<bool> recorded_ = false;  // whether a collective was captured in a CUDA graph
  std::mutex broken_mutex_;
  std::optional<Failure> broken_;
  uint64_t calls_ = 0;
};

// The table of wires, in order of preference.
struct WireEntry {
  const char* name;
  const char* description;
  std::vector<std::string> types;  // the communicator types that require it
  bool automatic;                  // whether AUTO tries it
  // Returns null on all ranks if it cannot connect them. *why stays empty if that is not worth
  // reporting.
  std::unique_ptr<Wire> (*connect)(Device& device, HostLink& host, Group::Seconds timeout,
                                   std::string* why);
};
const std::vector<WireEntry>& wire_table();

}  // namespace cgx::device
