#include "device/group.h"

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <span>
#include <vector>

#include "base/hash.h"
#include "base/status.h"
#include "device/direct.h"
#include "device/library.h"
#include "device/mpi_fabric.h"
#include "device/rounds.h"
#include "device/staged.h"

namespace cgx::device {
namespace {

// Why AUTO takes a slower way: to the user, once in a process.
void tell_once(const std::string& text) {
  static std::once_flag told;
  std::call_once(told, [&] { std::fprintf(stderr, "cgx: %s\n", text.c_str()); });
}

}  // namespace

const std::vector<WireEntry>& wire_table() {
  static const std::vector<WireEntry> table = {
      {"direct",
       "GPUs of one host write into each other's memory (CUDA IPC, peer access)",
       {"SHM"},
       true,
       connect_direct},
      // mpi and nccl are not for AUTO: they have never run between GPUs, and each call waits for
      // the ranks to agree.
      {"mpi",
       "MPI from GPU to GPU, where it says that it is CUDA-aware",
       {"MPI"},
       false,
       connect_mpi},
      {"staged",
       "encoded bytes through pinned memory and the communicator's own transport",
       {"MPI", "TCP"},
       true,
       connect_staged},
      {"nccl",
       "NCCL from GPU to GPU, also between hosts; one GPU for each rank",
       {"NCCL"},
       false,
       connect_nccl},
  };
  return table;
}

Group::Group(Device& device, HostLink& host, const std::string& type, Seconds timeout)
    : device_(device), host_(host) {
  std::string reasons;
  for (const WireEntry& entry : wire_table()) {
    const auto& types = entry.types;
    const bool asked = std::find(types.begin(), types.end(), type) != types.end();
    if (type == "AUTO" ? !entry.automatic : !asked) continue;
    std::string why;
    wire_ = entry.connect(device, host, timeout, &why);
    if (wire_) break;
    if (!why.empty()) reasons += join(reasons.empty() ? "" : "; ", entry.name, ": ", why);
  }
  require(wire_ != nullptr, CGX_SYSTEM, "the devices of communicator '", host.name(),
          "' cannot be connected (COMMUNICATOR_TYPE ", type, "): ", reasons);
  if (!reasons.empty())
    tell_once(join("devices of communicator '", host.name(), "' are connected by the wire '",
                   wire_->name(), "', not by a better one: ", reasons));
  tail_ = device.make_queue();
}

void Group::enqueue(Plan plan, Agreement agreement, const std::string& name, Seconds timeout,
                    void* stream) {
  plan.chunk_bytes = wire_->slot_bytes();
  const bool recording = device_.recording(stream);
  require(!recording || wire_->recordable(), CGX_UNSUPPORTED,
          "the stream is recording a CUDA graph, but the devices of communicator '", host_.name(),
          "' are connected by the wire '", wire_->name(),
          "', which needs the host each time: run this collective outside of graphs, or on GPUs "
          "that reach each other's memory");
  const Rounds rounds(std::move(plan));
  const auto queue = device_.wrap(stream);

  const std::lock_guard lock(mutex_);
  require_well();
  agreement.segments_hash ^=
      fnv1a(std::as_bytes(std::span(name)));  // calls match by order: their names must, too
  recorded_ = recorded_ || recording;
  // A graph is ordered by who replays it: events of outside are not for it.
  const auto order_next_after = [&] {
    if (!recording) tail_->follow(*queue);
  };
  try {
    if (!recording) queue->follow(*tail_);
    wire_->begin({agreement, calls_++, name, timeout}, *queue);
    try {
      for (int64_t round = 0; round < rounds.count(); ++round)
        rounds.run(round, *wire_, wire_->lane(round));
    } catch (const Error&) {  // half of it is on the wire's queues, and uses the caller's memory
      wire_->end(*queue);
      throw;
    }
    wire_->end(*queue);
    order_next_after();
  } catch (const Error& error) {
    break_with({error.status(), error.what()});
    try {
      wire_->give_up(*queue);
      order_next_after();     // what waits for all of it waits for this, too
    } catch (const Error&) {  // the device takes nothing any more: peers have their deadlines
    }
    throw;
  }
}

void Group::check(bool finish) {
  if (finish) finish_all();
  require_well();
}

void Group::finish_all() {
  tail_->synchronize();
  if (recorded_) device_.synchronize();
}

void Group::break_with(const Failure& failure) {
  const std::lock_guard lock(broken_mutex_);
  if (!broken_) broken_ = failure;
}

void Group::require_well() {
  if (const auto failure = wire_->failure()) break_with(*failure);
  const std::lock_guard lock(broken_mutex_);
  if (broken_)
    fail(broken_->status, "communicator '", host_.name(),
         "' is closed for devices: ", broken_->text);
}

void Group::close(Seconds at_most) {
  const std::lock_guard lock(mutex_);
  try {
    finish_all();
  } catch (const Error&) {
    // A device that is gone holds nothing up.
  }
  break_with({CGX_CLOSED, "it was closed on this rank"});
  wire_->close(at_most);
}

}  // namespace cgx::device
