// Exchanges bytes with every peer, unchanged. It sends the messages of GPUs that are not connected
// directly (device/staged.h).
#pragma once

#include <deque>
#include <span>
#include <vector>

#include "algorithm/algorithm.h"

namespace cgx {

class Relay : public Algorithm {
 public:
  // Bytes to send and to receive, per rank. Both ends must use equal lengths. The entries of this
  // rank are ignored. The memory must outlive the collective.
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
  std::vector<std::span<const std::byte>> outgoing_;  // not sent yet
  std::vector<std::span<std::byte>> incoming_;        // not received yet
  int next_;                                          // next peer to send to
};

}  // namespace cgx
