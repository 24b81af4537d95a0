#include "traffic.h"

namespace cgx {

Traffic& Traffic::carried() {
  static auto* traffic = new Traffic;  // never destroyed: threads may outlive static destructors
  return *traffic;
}

void Traffic::add(int64_t collectives, int64_t bytes_in, int64_t bytes_plain, int64_t bytes_sent) {
  collectives_ += collectives;
  bytes_in_ += bytes_in;
  bytes_plain_ += bytes_plain;
  bytes_sent_ += bytes_sent;
}

void Traffic::add_to(cgx_traffic_t* sum) const {
  sum->collectives += collectives_;
  sum->bytes_in += bytes_in_;
  sum->bytes_plain += bytes_plain_;
  sum->bytes_sent += bytes_sent_;
}

}  // namespace cgx
