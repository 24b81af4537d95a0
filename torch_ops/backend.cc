#include "backend.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "cuda.h"
#include "joint_work.h"
#include "status.h"

namespace cgx::torch_ops {
namespace {

// gloo cannot end calls in flight before their deadline, and its destructor waits for them.
std::thread destroy_in_background(Backend::Inner inner) {
  return std::thread([inner = std::move(inner)]() mutable { inner.clear(); });
}

}  // namespace

Backend::Backend(int rank, int size, int32_t comm, Inner inner, bool cuda,
                 c10::intrusive_ptr<Options> options, MakeBackend make_backend,
                 std::optional<Reconfigurations> reconfigurations)
    : c10d::Backend(rank, size),
      name_(options->group_name),
      comm_(comm),
      inner_(std::move(inner)),
      cuda_(cuda),
      options_(std::move(options)),
      make_backend_(std::move(make_backend)),
      reconfigurations_(std::move(reconfigurations)) {
  init();
}

// Releases the GIL: threads that the inner backends join may need it to free tensors.
Backend::~Backend() {
  without_lock([this] {
    close_communicator();
    inner_.clear();
    if (ending_.joinable()) ending_.join();
  });
}

// ---- The group ---------------------------------------------------------------------------------

void Backend::setTimeout(Milliseconds timeout) {
  options_->timeout = timeout;
  for (const auto& [device, backend] : inner()) backend->setTimeout(timeout);
}

Backend::BackendRef Backend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                   const std::vector<int>& ranks, const OptionsRef& options) {
  const auto self = std::find(ranks.begin(), ranks.end(), rank_);
  if (self == ranks.end()) return nullptr;
  return related(store, options, static_cast<int>(self - ranks.begin()),
                 static_cast<int>(ranks.size()));
}

Backend::BackendRef Backend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                   const OptionsRef& options, const int& rank, const int& size) {
  return related(store, options, rank, size);
}

Backend::BackendRef Backend::related(const c10::intrusive_ptr<c10d::Store>& store,
                                     const OptionsRef& options, int rank, int size) {
  // torch calls this once per device type with the same store, and uses one backend for all.
  if (related_store_ == store) {
    if (auto made = related_.lock()) return made;
  }
  const auto ours = c10::dynamic_intrusive_pointer_cast<Options>(options);
  auto copied = c10::make_intrusive<Options>(ours ? *ours : *options_);
  copied->group_name = options->group_name;
  copied->timeout = options->timeout;
  // A communication hook over this group is not one over the new group.
  if (copied->automatic == Automatic::kNothing) copied->automatic = Automatic::kGradients;
  BackendRef made = make_backend_(store, rank, size, std::move(copied));
  related_store_ = store;
  related_ = made;
  return made;
}

void Backend::eagerConnectSingleDevice(at::Device device) {
  const Inner all = inner();
  const auto found = all.find(device.type());
  if (found != all.end()) found->second->eagerConnectSingleDevice(device);
}

void Backend::setSequenceNumberForGroup() {
  for (const auto& [device, backend] : inner()) backend->setSequenceNumberForGroup();
}

void Backend::enableCollectivesTiming() {
  for (const auto& [device, backend] : inner()) backend->enableCollectivesTiming();
}

c10d::ErrorType Backend::getError() {
  auto info = make<cgx_comm_info_t>();
  const int32_t comm = comm_;
  const bool lost = !closed_ && comm != kNone &&
                    (cgx_comm_info(comm, &info) != CGX_OK || info.closed ||
                     cgx_comm_check(comm, /*finish=*/0) != CGX_OK);
  return lost ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void Backend::abort() {
  ++aborts_;
  disconnect("its process group was aborted");
}

// Takes everything first, because another thread may connect the next members at that time.
void Backend::disconnect(const std::string& reason) {
  int32_t comm = kNone;
  Inner old;
  {
    const std::lock_guard<std::mutex> lock(members_mutex_);
    old.swap(inner_);
    if (!closed_.exchange(true)) comm = comm_;
    if (reconfigurations_) comm_ = kNone;
  }
  if (comm != kNone) {
    cgx_comm_abort(comm, reason.c_str());
    forget_streams(comm);
  }
  // An elastic group continues: it never waits for calls of lost members.
  end(std::move(old), &c10d::Backend::abort, /*join=*/!reconfigurations_);
}

void Backend::shutdown() {
  close_communicator();
  Inner old;
  {
    const std::lock_guard<std::mutex> lock(members_mutex_);
    old.swap(inner_);
  }
  end(std::move(old), &c10d::Backend::shutdown, /*join=*/true);
}

void Backend::end(Inner old, void (c10d::Backend::*how)(), bool join) {
  if (old.empty()) return;
  std::exception_ptr failure;
  for (const auto& [device, backend] : old) {
    try {
      (*backend.*how)();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  std::thread destroying = destroy_in_background(std::move(old));
  if (join) {
    if (ending_.joinable()) ending_.join();
    ending_ = std::move(destroying);
  } else {
    destroying.detach();
  }
  if (failure) std::rethrow_exception(failure);
}

void Backend::close_communicator() {
  if (comm_ == kNone || closed_.exchange(true)) return;
  cgx_comm_close(comm_);  // fails if cgx_finalize has closed it
  forget_streams(comm_);
}

int32_t Backend::communicator() const {
  const int32_t comm = comm_;
  if (comm == kNone) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("cgx, group '", name_,
                             "': it is not connected: call torch.distributed._reconfigure with the "
                             "handles of its ranks"));
  }
  return comm;
}

Backend::Inner Backend::inner() const {
  const std::lock_guard<std::mutex> lock(members_mutex_);
  return inner_;
}

// ---- Coalescing --------------------------------------------------------------------------------

void Backend::startCoalescing() {
  leave_block();  // because of an exception in the last one
  const std::lock_guard<std::mutex> lock(coalescing_mutex_);
  coalescing_.emplace();
}

void Backend::leave_block() {
  BackendRef open;
  {
    const std::lock_guard<std::mutex> lock(coalescing_mutex_);
    coalescing_.reset();
    open = std::exchange(coalescing_inner_, {});
  }
  try {
    if (open) open->endCoalescing();
  } catch (const std::exception&) {  // the error that left it open was reported
  }
}

Backend::WorkRef Backend::endCoalescing() {
  std::unique_lock<std::mutex> lock(coalescing_mutex_);
  if (!coalescing_) C10_THROW_ERROR(ValueError, "endCoalescing: call startCoalescing first");
  auto works = std::move(*coalescing_);
  coalescing_.reset();
  const BackendRef inner = std::exchange(coalescing_inner_, {});
  lock.unlock();  // NCCL may wait for peers
  if (inner) {
    if (WorkRef work = inner->endCoalescing()) works.push_back(std::move(work));
  }
  return join_works(std::move(works));
}

Backend::WorkRef Backend::coalesced(WorkRef work) {
  const std::lock_guard<std::mutex> lock(coalescing_mutex_);
  if (coalescing_ && work) coalescing_->push_back(work);
  return work;
}

void Backend::coalesce_inner(at::Device device) {
  const std::lock_guard<std::mutex> lock(coalescing_mutex_);
  if (!coalescing_ || coalescing_inner_) return;
  BackendRef backend = inner(device);
  if (!backend->supportsCoalescing()) return;
  backend->startCoalescing();
  coalescing_inner_ = std::move(backend);
}

}  // namespace cgx::torch_ops
