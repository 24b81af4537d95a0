// The communicators of this process, by id and name. This is the only process-wide state of the
// core. The communicator named "world" has id 0.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "communicator.h"
#include "traffic.h"

namespace cgx {

// Throws Error(CGX_INVALID_ARGUMENT) unless the name is valid.
void check_name(const std::string& name);

class Registry {
 public:
  static Registry& instance();
  static constexpr int32_t kWorld = 0;
  static constexpr const char* kWorldName = "world";

  int32_t add(CommunicatorRef communicator);  // throws if the name is taken
  void require_free(const std::string& name) const;
  CommunicatorRef get(int32_t id) const;  // throws CGX_NOT_FOUND or CGX_CLOSED
  CommunicatorRef find_world() const;     // nullptr before cgx_init
  int32_t find(const std::string& name) const;
  std::vector<CommunicatorRef> all() const;
  int32_t next(int32_t after) const;  // the smallest id greater than `after`, or -1
  // Remove communicators, which the caller closes. It then calls closed() for each.
  CommunicatorRef remove(int32_t id);  // throws like get()
  std::map<int32_t, CommunicatorRef> remove_all();
  void closed(int32_t id, const CommunicatorRef& communicator);
  // Waits until no communicator is being closed. Returns whether this is so.
  bool wait_closed(std::chrono::duration<double> at_most);
  // Adds the collectives of all communicators, open, closed or being closed.
  void add_traffic(cgx_traffic_t* sum) const;
  // As get(), but also finds a communicator that is being closed, and throws the failure of the GPU
  // collectives of one that was closed.
  CommunicatorRef get_to_check(int32_t id) const;

 private:
  void require_free_locked(const std::string& name) const;
  CommunicatorRef get_locked(int32_t id) const;

  mutable std::mutex mutex_;
  std::condition_variable all_closed_;
  std::map<int32_t, CommunicatorRef> communicators_;
  std::multimap<int32_t, CommunicatorRef> closing_;  // the world may exist again
  std::map<int32_t, Error> failures_;                // of closed communicators
  Traffic closed_traffic_;                           // of closed communicators
  int32_t next_ = kWorld + 1;
  bool had_world_ = false;
};

}  // namespace cgx
