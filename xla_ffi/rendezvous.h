// The rendezvous of the devices of one process for a collective with other processes.
//
//   1. join     each device adds its call; the last one starts the rest on the pool
//   2. reduce   sum the devices' values and residuals exactly, in fp32, in the order of the group
//   3. exchange one message of this process, through the communicator of the group's processes
//   4. deliver  to every device, rounded to its dtype; the residual to the first, zeros to others
//
// If a device does not join before the deadline, all joined calls fail, and the other processes get
// a refusal. A device that joins later fails immediately.
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

class Rendezvous : public std::enable_shared_from_this<Rendezvous> {
 public:
  // Opens a rendezvous of the members of `group` in its `process`-th process, with a deadline of
  // `timeout_s` seconds. `run` is XLA's number of the launch.
  static std::shared_ptr<Rendezvous> Open(const Site& site, const Group& group, int64_t process,
                                          int64_t run, double timeout_s);

  // Returns whether all devices have joined.
  bool Join(int64_t place, std::shared_ptr<Call> call);
  // Fails all calls, unless all devices have joined already.
  void Fail(cgx_status_t status, const std::string& text);
  void Expire();  // fails, since the deadline has passed

 private:
  Rendezvous(const Site& site, const Group& group, int64_t process, int64_t run, double timeout_s);

  void Run();
  // Returns a message without values. Its averages are over devices, not processes.
  std::shared_ptr<Message> NewMessage(int32_t dtype) const;
  std::shared_ptr<Message> ReduceAll();
  std::shared_ptr<Message> ReduceScatter();
  std::shared_ptr<Message> Gather();
  std::shared_ptr<Message> Exchange();
  void End(cgx_status_t status, const std::string& text);
  void Deliver(int64_t place);

  const Site& site_;  // it and its groups outlive the calls
  const Group& group_;
  const int64_t process_, run_;
  const double timeout_s_;

  std::mutex mutex_;
  std::vector<std::shared_ptr<Call>> calls_;  // by place; guarded by mutex_ until all have joined
  size_t joined_ = 0;
  cgx_status_t failed_ = CGX_OK;
  std::string why_;

  // The sent and the received values, which may share a buffer, and the sum of the residuals.
  std::unique_ptr<std::byte[]> sent_, received_, residual_;
};

}  // namespace cgx::xla
