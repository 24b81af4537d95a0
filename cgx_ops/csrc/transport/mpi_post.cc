#include "transport/mpi_post.h"

#include <mpi.h>
// After mpi.h, whose macros it needs.
#include <mpi-ext.h>

#include <cstring>
#include <utility>

#include "base/status.h"
#include "transport/mpi_world.h"

namespace cgx {

MpiPrefix MpiMessage::prefix() const {
  MpiPrefix prefix;
  std::memcpy(&prefix, block.get(), sizeof(prefix));
  return prefix;
}

std::span<const std::byte> MpiMessage::payload() const {
  return std::span<const std::byte>(block.get(), size).subspan(sizeof(MpiPrefix));
}

MpiPost& MpiPost::instance() {
  static auto* post = new MpiPost;  // never destroyed: MPI may still write to its messages
  return *post;
}

std::shared_ptr<MpiBox> MpiPost::open(uint64_t communicator) {
  auto box = std::make_shared<MpiBox>();
  const std::lock_guard lock(boxes_mutex_);
  std::erase_if(boxes_, [](const auto& entry) { return entry.second.expired(); });
  box->dead.assign(dead_.begin(), dead_.end());
  boxes_[communicator] = box;
  return box;
}

std::shared_ptr<MpiBox> MpiPost::box(uint64_t communicator) {
  const std::lock_guard lock(boxes_mutex_);
  const auto found = boxes_.find(communicator);
  return found == boxes_.end() ? nullptr : found->second.lock();
}

void MpiPost::progress() {
  const std::unique_lock lock(progressing_, std::try_to_lock);
  if (!lock) return;
  probe();
  deliver();
}

void MpiPost::probe() {
  for (;;) {
    int found = 0;
    MPI_Message handle;
    MPI_Status status;
    const int code =
        MPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, mpi_job().messages, &found, &handle, &status);
    if (code != MPI_SUCCESS) {
      if (!learn_of_deaths()) check_mpi(code, "MPI_Improbe");
      return;
    }
    if (!found) return;
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    const auto size = static_cast<size_t>(bytes);
    Incoming incoming{
        {status.MPI_SOURCE, static_cast<uint32_t>(status.MPI_TAG), blocks_.take(size), size},
        MPI_REQUEST_NULL};
    const int received =
        MPI_Imrecv(incoming.message.block.get(), bytes, MPI_BYTE, &handle, &incoming.request);
    if (received == MPI_SUCCESS)
      receiving_.push_back(std::move(incoming));
    else if (!learn_of_deaths())
      check_mpi(received, "MPI_Imrecv");
  }
}

// Delivers the messages of each sender in order. A slow sender does not delay others.
void MpiPost::deliver() {
  std::set<int> unfinished;  // senders
  for (auto it = receiving_.begin(); it != receiving_.end();) {
    const int sender = it->message.sender;
    int done = 0, code = MPI_SUCCESS;
    if (!unfinished.contains(sender)) code = MPI_Test(&it->request, &done, MPI_STATUS_IGNORE);
    if (code == MPI_SUCCESS && !done) {
      unfinished.insert(sender);
      ++it;
      continue;
    }
    MpiMessage message = std::move(it->message);
    it = receiving_.erase(it);
    if (code == MPI_SUCCESS)
      put(std::move(message));
    else if (!learn_of_deaths())
      check_mpi(code, "MPI_Test");
  }
}

void MpiPost::put(MpiMessage message) {
  const bool whole = message.size >= sizeof(MpiPrefix);
  const auto to = whole ? box(message.prefix().communicator) : nullptr;
  if (!to) {
    blocks_.give_back(std::move(message.block), message.size);
    require(whole, CGX_PEER_FAILED, "rank ", message.sender, " of the MPI job sent ", message.size,
            " bytes, which are not a message of cgx");
    return;
  }
  {
    const std::lock_guard lock(to->mutex);
    to->messages.push_back(std::move(message));
  }
  to->bell.ring();
}

// Asks a fault-tolerant MPI (mpirun --with-ft ulfm) which processes have died. Returns false if
// none have.
bool MpiPost::learn_of_deaths() {
  bool any = false;
#if defined(OMPI_HAVE_MPI_EXT_FTMPI) && OMPI_HAVE_MPI_EXT_FTMPI
  MPI_Comm comm = mpi_job().messages;
  MPI_Group failed = MPI_GROUP_NULL, all = MPI_GROUP_NULL;
  if (MPIX_Comm_failure_ack(comm) != MPI_SUCCESS ||
      MPIX_Comm_failure_get_acked(comm, &failed) != MPI_SUCCESS)
    return false;
  MPI_Comm_group(comm, &all);
  int count = 0;
  MPI_Group_size(failed, &count);
  const std::lock_guard lock(boxes_mutex_);
  for (int i = 0; i < count; ++i) {
    int rank = MPI_UNDEFINED;
    MPI_Group_translate_ranks(failed, 1, &i, all, &rank);
    any = true;
    if (rank == MPI_UNDEFINED || !dead_.insert(rank).second) continue;
    for (const auto& [communicator, weak] : boxes_) {
      const auto box = weak.lock();
      if (!box) continue;
      const std::lock_guard box_lock(box->mutex);
      box->dead.push_back(rank);
    }
  }
  MPI_Group_free(&failed);
  MPI_Group_free(&all);
#endif
  return any;
}

}  // namespace cgx
