// Changes the members of a group: torch's reconfigure, from torch 2.14 on. Python connects the
// processes (cgx_ops/torch/backend/make.py); this file ends the old group and starts the new one.
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
  const int aborts = aborts_;
  Members members = reconfigurations_->reconfigure(
      options.handles, options.uuid, options.timeout,
      [this](const std::string& reason) { without_lock([&] { disconnect(reason); }); });
  for (const auto& [device, backend] : members.inner) backend->setTimeout(options_->timeout);
  leave_block();
  {
    const std::lock_guard<std::mutex> draws_lock(draws_mutex_);
    const std::lock_guard<std::mutex> lock(members_mutex_);
    inner_ = std::move(members.inner);
    comm_ = members.comm;
    closed_ = false;
    rank_ = members.rank;
    size_ = members.size;
    // As in a new group.
    sequence_ = 0;
    draws_.clear();
  }
  if (aborts == aborts_) return join_works({});
  disconnect("its process group was aborted");
  C10_THROW_ERROR(DistBackendError, c10::str("cgx, group '", name_,
                                             "': it was aborted while it was reconfigured: "
                                             "reconfigure it with a fresh uuid"));
}

}  // namespace cgx::torch_ops

#endif
