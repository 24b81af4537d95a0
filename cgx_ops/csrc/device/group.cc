#include "device/group.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "algorithm/block_sizes.h"
#include "base/bytes.h"
#include "base/hash.h"
#include "base/status.h"
#include "device/agree.h"
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

// The message of a rank before a call with splits. The sizes of its blocks follow.
struct Announced {
  Agreement agreement;
  int64_t rounds;
};
constexpr int kMostRanksWithSplits = 200;
static_assert(sizeof(Announced) + 2 * kMostRanksWithSplits * sizeof(int64_t) < 4000);

std::string comparison_of(uint64_t number) { return join("blocks of call ", number); }

// With splits, no rank knows the blocks of the others. Compares the calls of all ranks on the host,
// which waits for them, and returns the number of rounds of the rank that has most. If
// make_rounds() throws on some rank, this does on all.
int64_t agree_on_blocks(HostLink& host, const Plan& plan, const Agreement& agreement,
                        const std::string& name, uint64_t number, Group::Seconds timeout,
                        const std::function<const Rounds&()>& make_rounds) {
  const std::string title = join("device collective ", title_of(name, number));
  const size_t size = plan.members.size();
  require(size <= kMostRanksWithSplits, CGX_UNSUPPORTED, title, ": all_to_all over ", size,
          " ranks with sizes is not supported on GPUs; accepted: at most ", kMostRanksWithSplits);
  std::exception_ptr own;
  const auto announce = [&] {
    try {
      Bytes mine = to_bytes(Announced{agreement, make_rounds().count()});
      const Bytes sizes = BlockSizes::of(plan).to_bytes();
      mine.insert(mine.end(), sizes.begin(), sizes.end());
      return mine;
    } catch (...) {
      own = std::current_exception();
      throw;
    }
  };
  std::vector<Bytes> blobs;
  std::string why;
  try {
    if (!all_succeed(host, comparison_of(number), timeout, announce, &blobs, &why)) {
      if (own) std::rethrow_exception(own);
      fail(CGX_PEER_FAILED, why);
    }
  } catch (const Error& error) {
    throw Error(error.status(), join(title, ": ", error.what()));
  }
  std::vector<BlockSizes> all;
  int64_t rounds = 1, largest = 1;
  for (size_t rank = 0; rank < size; ++rank) {
    const std::span<const std::byte> blob(blobs[rank]);
    const size_t head = std::min(blob.size(), sizeof(Announced));
    const auto theirs = from_bytes<Announced>(blob.first(head), title, ": a blob of rank ", rank);
    require(agreements_match(agreement, theirs.agreement), CGX_MISMATCH, title, ": rank ", rank,
            " disagrees: ", difference(agreement, theirs.agreement));
    all.push_back(BlockSizes::from_bytes(blob.subspan(head), size));
    rounds = std::max(rounds, theirs.rounds);
    for (const int64_t each : all.back().sent) largest = std::max(largest, each);
  }
  const std::string differs = difference(plan.members, all);
  require(differs.empty(), CGX_MISMATCH, title, ": ", differs);
  require(rounds <= largest, CGX_PEER_FAILED, title, ": a rank asks for ", rounds,
          " rounds for at most ", largest, " elements");
  return rounds;
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
  const bool has_splits = plan.has_splits;
  std::optional<Rounds> made;
  const auto make_rounds = [&]() -> const Rounds& {
    require(!recording, CGX_UNSUPPORTED,
            "the stream is capturing a CUDA graph, but ranks must compare the sizes of blocks on "
            "the host: run this collective outside of graphs");
    return made.emplace(plan);
  };
  if (!has_splits) made.emplace(std::move(plan));
  const auto queue = device_.wrap(stream);

  const std::lock_guard lock(mutex_);
  require_well();
  agreement.segments_hash ^= fnv1a(std::as_bytes(std::span(name)));  // calls match by order, so
                                                                     // their names must match, too
  const uint64_t number = calls_++;
  const int64_t count =
      has_splits ? agree_on_blocks(host_, plan, agreement, name, number, timeout, make_rounds)
                 : made->count();
  const Rounds& rounds = *made;
  recorded_ = recorded_ || recording;
  // Whoever replays a graph orders it, so it does not use events from outside.
  const auto order_next_after = [&] {
    if (!recording) queue->record(*last_end_);
  };
  try {
    if (!recording) queue->wait_for(*last_end_);
    wire_->begin({agreement, number, name, timeout}, *queue);
    try {
      for (int64_t round = 0; round < count; ++round) rounds.run(round, *wire_, wire_->lane(round));
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

void Group::refuse(const std::string& why, Seconds timeout) {
  const auto step = [&]() -> Bytes { fail(CGX_PEER_FAILED, "it takes no part: ", why); };
  std::vector<Bytes> nothing;
  std::string first;
  const std::lock_guard lock(mutex_);
  require_well();
  all_succeed(host_, comparison_of(calls_++), timeout, step, &nothing, &first);
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
  const std::lock_guard lock(broken_mutex_);
  if (!broken_) broken_ = wire_->failure();  // not after close()
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
  if (const auto failure = wire_->failure()) break_with(*failure);
  break_with({CGX_CLOSED, "it was closed on this rank"});
  wire_->close(at_most);
}

}  // namespace cgx::device
