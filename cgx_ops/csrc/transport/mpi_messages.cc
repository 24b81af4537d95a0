#include "transport/mpi_messages.h"

#include <mpi.h>
// After mpi.h, whose macros it needs.
#include <mpi-ext.h>

#include <atomic>
#include <climits>
#include <cstring>
#include <set>
#include <thread>
#include <utility>

#include "base/status.h"
#include "transport/mpi.h"
#include "transport/mpi_world.h"

namespace cgx {
namespace {

// The number of tags that every MPI supports. Tags are assigned in turn: two endpoints that are
// 32,768 apart share one, and must not have messages in flight at the same time.
constexpr int kTags = 32768;
std::atomic<unsigned> next_tag{0};

struct Address {
  uint64_t job;
  int32_t rank;  // in the job
  int32_t tag;
};

Address read(const Bytes& bytes) {
  Address address;
  std::memcpy(&address, bytes.data(), sizeof(address));
  return address;
}

bool means_dead_peer(int code) {
#if defined(OMPI_HAVE_MPI_EXT_FTMPI) && OMPI_HAVE_MPI_EXT_FTMPI
  int kind = MPI_SUCCESS;
  MPI_Error_class(code, &kind);
  return kind == MPIX_ERR_PROC_FAILED;
#else
  return false;
#endif
}

// Pending messages, and messages that ended since the last time that nothing was pending.
struct Sets {
  using Memory = MpiMessages::Memory;
  struct Message {
    int peer;
    bool received;
    Memory memory;
  };

  // Reserves all memory in advance, so that no allocation can fail after MPI has the message.
  void add(int peer, bool received, Memory memory) {
    messages.push_back({peer, received, std::move(memory)});
    requests.push_back(MPI_REQUEST_NULL);
    ended.resize(requests.size());
    statuses.resize(requests.size());
  }

  std::vector<MPI_Request> requests;  // null: ended
  std::vector<Message> messages;
  std::vector<int> ended;  // of the last test: indices and statuses
  std::vector<MPI_Status> statuses;
};

class JobMessages final : public MpiMessages {
 public:
  JobMessages() : tag_(static_cast<int>(next_tag++ % kTags)), sets_(std::make_unique<Sets>()) {}

  Bytes address() const override;
  bool connect(const std::vector<Bytes>& addresses) override;
  void send(int peer, Memory from, size_t bytes) override;
  void receive(int peer, Memory to, size_t bytes) override;
  bool pending() const override { return pending_ > 0; }
  std::set<int> pending_peers() const override;
  bool progress() override;
  void abandon(std::chrono::duration<double> at_most) override;

 private:
  struct Peer {
    int rank;  // in the job
    int tag;   // for messages to it
  };

  void require_success(int code, int peer) const;

  const int tag_;  // for messages to this rank
  std::vector<Peer> peers_;
  std::unique_ptr<Sets> sets_;
  int pending_ = 0;
};

Bytes JobMessages::address() const {
  if (!mpi_job().ready || mpi_finalized()) return {};
  Address mine{mpi_job().number, 0, tag_};
  MPI_Comm_rank(mpi_job().world, &mine.rank);
  Bytes bytes(sizeof(mine));
  std::memcpy(bytes.data(), &mine, sizeof(mine));
  return bytes;
}

bool JobMessages::connect(const std::vector<Bytes>& addresses) {
  std::set<int32_t> ranks;
  for (const Bytes& bytes : addresses) {
    if (bytes.size() != sizeof(Address)) return false;
    if (read(bytes).job != read(addresses[0]).job) return false;
    if (!ranks.insert(read(bytes).rank).second) return false;
  }
  for (const Bytes& bytes : addresses) peers_.push_back({read(bytes).rank, read(bytes).tag});
  return true;
}

void JobMessages::send(int peer, Memory from, size_t bytes) {
  require(bytes <= INT_MAX, CGX_INTERNAL, "an MPI message of ", bytes, " bytes is too long");
  std::byte* const at = from.get();
  sets_->add(peer, false, std::move(from));
  MPI_Request request = MPI_REQUEST_NULL;
  // Synchronous mode: a message that MPI has only buffered might need further calls of this rank to
  // arrive.
  require_success(MPI_Issend(at, static_cast<int>(bytes), MPI_BYTE, peers_[peer].rank,
                             peers_[peer].tag, mpi_job().world, &request),
                  peer);
  sets_->requests.back() = request;
  ++pending_;
}

void JobMessages::receive(int peer, Memory to, size_t bytes) {
  require(bytes <= INT_MAX, CGX_INTERNAL, "an MPI message of ", bytes, " bytes is too long");
  std::byte* const at = to.get();
  sets_->add(peer, true, std::move(to));
  MPI_Request request = MPI_REQUEST_NULL;
  require_success(MPI_Irecv(at, static_cast<int>(bytes), MPI_BYTE, peers_[peer].rank, tag_,
                            mpi_job().world, &request),
                  peer);
  sets_->requests.back() = request;
  ++pending_;
}

std::set<int> JobMessages::pending_peers() const {
  std::set<int> peers;
  for (size_t i = 0; i < sets_->requests.size(); ++i)
    if (sets_->requests[i] != MPI_REQUEST_NULL) peers.insert(sets_->messages[i].peer);
  return peers;
}

bool JobMessages::progress() {
  require_mpi();
  auto& [requests, messages, ended, statuses] = *sets_;
  int count = 0;
  const int code = MPI_Testsome(static_cast<int>(requests.size()), requests.data(), &count,
                                ended.data(), statuses.data());
  if (count == MPI_UNDEFINED) count = 0;
  pending_ -= count;
  for (int i = 0; i < count; ++i) requests[ended[i]] = MPI_REQUEST_NULL;  // also failed ones
  if (code != MPI_SUCCESS) {
    for (int i = 0; i < count; ++i) require_success(statuses[i].MPI_ERROR, messages[ended[i]].peer);
    check_mpi(code, "MPI_Testsome");
  }
  if (pending_ == 0) {
    requests.clear();
    messages.clear();
  }
  return count > 0;
}

void JobMessages::abandon(std::chrono::duration<double> at_most) {
  const auto deadline = std::chrono::steady_clock::now() + at_most;
  if (!mpi_finalized()) {
    for (size_t i = 0; i < sets_->requests.size(); ++i)
      if (sets_->messages[i].received && sets_->requests[i] != MPI_REQUEST_NULL)
        MPI_Cancel(&sets_->requests[i]);
    while (pending() && std::chrono::steady_clock::now() < deadline) {
      bool moved = false;
      try {
        moved = progress();
      } catch (const Error&) {  // a failed message has ended, too
      }
      if (!moved) std::this_thread::sleep_for(kMpiPollInterval);
    }
  }
  if (!pending()) return;
  sets_.release();  // NOLINT: MPI may still use what is in it
  pending_ = 0;
  mpi_leave_behind();
}

void JobMessages::require_success(int code, int peer) const {
  if (code == MPI_SUCCESS) return;
  const bool died = means_dead_peer(code);
  fail(died ? CGX_PEER_FAILED : CGX_SYSTEM, "MPI ", died ? "has lost" : "cannot reach", " rank ",
       peer, ", rank ", peers_[peer].rank, " of the job: ", mpi_text(code));
}

}  // namespace

std::unique_ptr<MpiMessages> make_messages_of_job() { return std::make_unique<JobMessages>(); }

}  // namespace cgx
