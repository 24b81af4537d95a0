// Where the devices of one process meet for a collective with other processes.
//
//   1. join     each device brings its call; the last to come starts the rest on the pool
//   2. reduce   exact fp32 sums of the devices' values, in the order of the group, and of their
//               residuals
//   3. exchange one message of this process, through the communicator of the group's processes
//   4. deliver  to every device, rounded to its dtype; the residual to the first, zeros to others
//
// Who has not come before the deadline fails all who have, here and, by a refusal, in the other
// processes; who comes later fails at once.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "call.h"
#include "cgx/cgx.h"
#include "site.h"

namespace cgx::xla {

class Meeting : public std::enable_shared_from_this<Meeting> {
 public:
  // Of the members of `group` in its `process`-th process, before `timeout_s` seconds have passed;
  // `run`: XLA's number of the launch.
  static std::shared_ptr<Meeting> Open(const Site& site, const Group& group, int64_t process,
                                       int64_t run, double timeout_s);

  // Returns whether everybody is here.
  bool Join(int64_t place, std::shared_ptr<Call> call);
  // Unless everybody is here already.
  void Fail(cgx_status_t status, const std::string& text);
  void Expire();  // fails: the deadline has passed

 private:
  Meeting(const Site& site, const Group& group, int64_t process, int64_t run, double timeout_s);

  void Run();
  // Without values; averages are over the devices, not the processes.
  std::shared_ptr<Message> NewMessage(int32_t dtype) const;
  std::shared_ptr<Message> ReduceAll();
  std::shared_ptr<Message> ReduceScatter();
  std::shared_ptr<Message> Gather();
  void End(cgx_status_t status, const std::string& text);
  void Deliver(int64_t place);

  const Site& site_;  // it and its groups outlive the calls
  const Group& group_;
  const int64_t process_, run_;
  const double timeout_s_;

  std::mutex mutex_;
  std::vector<std::shared_ptr<Call>> calls_;  // by place; guarded by mutex_ until all are here
  size_t joined_ = 0;
  cgx_status_t failed_ = CGX_OK;
  std::string why_;

  // What goes out and comes back, which may be one buffer, and the residuals' sum.
  std::unique_ptr<std::byte[]> sent_, received_, residual_;
};

}  // namespace cgx::xla
