// Traffic totals of this process: of closed communicators, and of collectives whose messages the
// caller sends (cgx.h, section 5).
#pragma once

#include <atomic>
#include <cstdint>

#include "cgx/cgx.h"

namespace cgx {

class Traffic {
 public:
  static Traffic& carried();

  // Adds collectives. bytes_plain: as in cgx_comm_info_t.
  void add(int64_t collectives, int64_t bytes_in, int64_t bytes_plain, int64_t bytes_sent);
  // Adds bytes to a collective that was added before.
  void add_sent(int64_t bytes) { bytes_sent_ += bytes; }
  void add_to(cgx_traffic_t* sum) const;

 private:
  std::atomic<int64_t> collectives_{0}, bytes_in_{0}, bytes_plain_{0}, bytes_sent_{0};
};

}  // namespace cgx
