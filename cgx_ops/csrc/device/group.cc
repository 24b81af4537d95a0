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

// Reports once per process why AUTO uses a slower wire.
void warn_once(const std::string& text) {
  static std::once_flag warned;
  std::call_once(warned, [&] { std::fprintf(stderr, "cgx: %s\n", text.c_str()); });
}

}  // namespace

const std::vector<WireEntry>& wire_table() {
  static const std::vector<WireEntry> table = {
      {"direct",
       "GPUs of one host write into each other's memory (CUDA IPC, peer access)",
       {"SHM"},
       true,
       connect_direct},
      // AUTO does not use mpi and nccl: they have not been tested between GPUs, and each call waits
      // for ranks to agree.
      {"mpi", "a CUDA-aware MPI, from GPU to GPU", {"MPI"}, false, connect_mpi},
      {"staged",
       "encoded bytes through pinned memory and the communicator's CPU transport",
       {"MPI", "TCP"},
       true,
       connect_staged},
      {"nccl",
       "NCCL from GPU to GPU, also between hosts; one GPU per rank",
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
  require(wire_ != nullptr, CGX_SYSTEM, "cannot connect the GPUs of communicator '", host.name(),
          "' (COMMUNICATOR_TYPE ", type, "): ", reasons);
  if (!reasons.empty())
    warn_once(join("the GPUs of communicator '", host.name(), "' use the wire '", wire_->name(),
                   "' because better ones are not available: ", reasons));
  last_end_ = device.make_event();
}

void Group::enqueue(Plan plan, Agreement agreement, const std::string& name, Seconds timeout,
                    void* stream) {
  plan.chunk_bytes = wire_->slot_bytes();
  const bool recording = device_.recording(stream);
  require(!recording || wire_->recordable(), CGX_UNSUPPORTED,
          "the stream is capturing a CUDA graph, but the GPUs of communicator '", host_.name(),
          "' use the wire '", wire_->name(),
          "', which needs the host for each call: run this collective outside of graphs, or use "
          "GPUs that can access each other's memory");
  const Rounds rounds(std::move(plan));
  const auto queue = device_.wrap(stream);

  const std::lock_guard lock(mutex_);
  require_well();
  agreement.segments_hash ^= fnv1a(std::as_bytes(std::span(name)));  // calls match by order, so
                                                                     // their names must match, too
  recorded_ = recorded_ || recording;
  // Whoever replays a graph orders it, so it does not use events from outside.
  const auto order_next_after = [&] {
    if (!recording) queue->record(*last_end_);
  };
  try {
    if (!recording) queue->wait_for(*last_end_);
    wire_->begin({agreement, calls_++, name, timeout}, *queue);
    try {
      for (int64_t round = 0; round < rounds.count(); ++round)
        rounds.run(round, *wire_, wire_->lane(round));
    } catch (const Error&) {  // part of it is enqueued and uses the caller's memory
      wire_->end(*queue);
      throw;
    }
    wire_->end(*queue);
    order_next_after();
  } catch (const Error& error) {
    break_with({error.status(), error.what()});
    try {
      wire_->give_up(*queue);
      order_next_after();     // later work waits for this, too
    } catch (const Error&) {  // the device accepts no work: peers reach their deadlines
    }
    throw;
  }
}

void Group::check(bool finish) {
  if (finish) finish_all();
  require_well();
}

void Group::finish_all() {
  last_end_->synchronize();
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
    fail(broken_->status, "communicator '", host_.name(), "' is closed for GPUs: ", broken_->text);
}

void Group::close(Seconds at_most) {
  const std::lock_guard lock(mutex_);
  try {
    finish_all();
  } catch (const Error&) {
    // A failed device must not prevent closing.
  }
  break_with({CGX_CLOSED, "it was closed on this rank"});
  wire_->close(at_most);
}

}  // namespace cgx::device
