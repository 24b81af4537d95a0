#include "algorithm/algorithm.h"

#include "base/status.h"

namespace cgx {

void Algorithm::deliver_eager(int source, Bytes payload) {
  require(awaits_eager(source, payload.size()), CGX_PEER_FAILED, "rank ", source, " sent ",
          payload.size(), " bytes of values in its header, which are not those of the collective");
  take_eager(source, std::move(payload));
}

void Algorithm::deliver(int part, Arrival arrival) {
  const auto bytes = static_cast<int64_t>(arrival.bytes.size());
  const int64_t expected = due(arrival.source, part);
  require(expected != kNone, CGX_PEER_FAILED, "rank ", arrival.source, " sent a message of ", bytes,
          " bytes in phase ", phase(), ", where none is due from it");
  require(expected == bytes, CGX_PEER_FAILED, "rank ", arrival.source, " sent a message of ", bytes,
          " bytes in phase ", phase(), ", where one of ", expected, " is due");
  take(part, std::move(arrival));
}

}  // namespace cgx
