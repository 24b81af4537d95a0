// Changes the members of a group: torch's reconfigure, from torch 2.14 on. Python connects the
// processes (cgx_ops/torch/backend/make.py); this file ends the old group and starts the new one.
#include <thread>
#include <utility>

#include "backend.h"
#include "joint_work.h"

#ifdef C10D_BACKEND_HAS_RECONFIGURE

namespace cgx::torch_ops {

c10d::ReconfigureHandle Backend::get_reconfigure_handle() const {
  return reconfigurations_ ? reconfigurations_->handle()
                           : c10d::Backend::get_reconfigure_handle();  // throws
}

Backend::WorkRef Backend::reconfigure(const c10d::ReconfigureOptions& options) {
  if (!reconfigurations_) return c10d::Backend::reconfigure(options);  // throws
  Members members = reconfigurations_->reconfigure(
      options.handles, options.uuid, options.timeout,
      [this](const std::string& reason) { without_lock([&] { end_members(reason); }); });
  for (const auto& [device, backend] : members.inner) backend->setTimeout(options_->timeout);
  {
    const std::lock_guard<std::mutex> lock(inner_mutex_);
    inner_ = std::move(members.inner);
  }
  // As in a new group.
  rank_ = members.rank;
  size_ = members.size;
  sequence_ = 0;
  {
    const std::lock_guard<std::mutex> lock(draws_mutex_);
    draws_.clear();
  }
  comm_ = members.comm;
  closed_ = false;
  return join_works({});
}

// gloo cannot end calls in flight before their deadline, and its destructor waits for them. So
// another thread destroys the inner backends, and the next members get new ones.
void Backend::end_members(const std::string& reason) {
  disconnect(reason);
  Inner old;
  {
    const std::lock_guard<std::mutex> lock(inner_mutex_);
    old.swap(inner_);
  }
  if (!old.empty()) std::thread([old = std::move(old)]() mutable { old.clear(); }).detach();
}

}  // namespace cgx::torch_ops

#endif
