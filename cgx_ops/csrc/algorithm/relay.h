// Bytes to and from every peer, as they are: carries the messages of devices that are not connected
// with each other (device/staged.h).
#pragma once

#include <deque>
#include <span>
#include <vector>

#include "algorithm/algorithm.h"

namespace cgx {

class Relay : public Algorithm {
 public:
  // By rank: what goes there and what comes from there, of known length on both ends. A rank's own
  // are ignored. The memory outlives the collective.
  Relay(int rank, std::vector<std::span<const std::byte>> outgoing,
        std::vector<std::span<std::byte>> incoming);

  Step step(Port& port) override;
  bool finished() const override;
  bool waits_for(int rank) const override;
  const char* phase() const override { return "relay"; }

 private:
  std::optional<Length> due(int source, int part) const override;
  void take(int part, Arrival arrival) override;

  const int rank_;
  std::vector<std::span<const std::byte>> outgoing_;  // what is still to be sent
  std::vector<std::span<std::byte>> incoming_;        // what is still to come
  int next_;                                          // peer to send to
};

}  // namespace cgx
