#include "algorithm/algorithm.h"

#include "base/status.h"

namespace cgx {

void Algorithm::deliver_eager(int source, Bytes payload) {
  require(awaits_eager(source, payload.size()), CGX_PEER_FAILED, "rank ", source, " sent ",
          payload.size(), " bytes of values in its header, which the collective does not expect");
  take_eager(source, std::move(payload));
}

void Algorithm::deliver(int part, Arrival arrival) {
  const auto bytes = static_cast<int64_t>(arrival.bytes.size());
  const std::optional<Length> expected = due(arrival.source, part);
  require(expected.has_value(), CGX_PEER_FAILED, "rank ", arrival.source, " sent a message of ",
          bytes, " bytes in phase ", phase(), ", but none is due");
  require(expected->fits(bytes), CGX_PEER_FAILED, "rank ", arrival.source, " sent a message of ",
          bytes, " bytes in phase ", phase(), ", but one of ",
          expected->least == expected->most ? "" : "at most ", expected->most, " is due");
  take(part, std::move(arrival));
}

}  // namespace cgx
