// The devices of a communicator's ranks, one each: made at its first device collective, by trying
// the wires in order of preference until one connects all ranks.
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
  // that of the one wire to use. Throws Error(CGX_SYSTEM) if no wire connects the ranks.
  Group(Device& device, HostLink& host, const std::string& type, Seconds timeout);

  // Puts the collective on the stream. The plan's algorithm is picked; `agreement` is of the call.
  void enqueue(Plan plan, Agreement agreement, const std::string& name, Seconds timeout,
               void* stream);
  // Throws what a collective has failed with. finish: after all have ended.
  void check(bool finish);
  // Once: what is on the device ends (its deadlines bound that).
  void close(Seconds at_most);

  Device& device() const { return device_; }
  const char* wire() const { return wire_->name(); }

 private:
  // What is on the device ends, replays of graphs included.
  void finish_all();
  void break_with(const Failure& failure);  // the first counts
  void require_well();

  Device& device_;
  HostLink& host_;
  std::mutex mutex_;
  std::unique_ptr<Wire> wire_;
  // Follows every collective, and the next one follows it, even where the stream seems to be the
  // same: a handle may be a thread's own stream, or one that took another's place.
  std::unique_ptr<Queue> tail_;
  std::atomic<bool> recorded_ = false;  // some collective is in a CUDA graph
  std::mutex broken_mutex_;
  std::optional<Failure> broken_;
  uint64_t calls_ = 0;
};

// The table of wires, in order of preference.
struct WireEntry {
  const char* name;
  const char* description;
  std::vector<std::string> types;  // the communicator types that insist on it
  bool automatic;                  // AUTO tries it
  // Null on all ranks if it cannot connect them; *why is left empty where that is nothing to tell.
  std::unique_ptr<Wire> (*connect)(Device& device, HostLink& host, Group::Seconds timeout,
                                   std::string* why);
};
const std::vector<WireEntry>& wire_table();

}  // namespace cgx::device
