#include "algorithm/relay.h"

#include <algorithm>
#include <cstring>

namespace cgx {

Relay::Relay(int rank, std::vector<std::span<const std::byte>> outgoing,
             std::vector<std::span<std::byte>> incoming)
    : rank_(rank), outgoing_(std::move(outgoing)), incoming_(std::move(incoming)), next_(rank) {
  outgoing_[rank] = {};
  incoming_[rank] = {};
}

// Sends one message to the next peer in turn, so that all links are busy from the start.
Step Relay::step(Port& port) {
  const int size = static_cast<int>(outgoing_.size());
  for (int tried = 0; tried < size; ++tried) {
    next_ = (next_ + 1) % size;
    auto& rest = outgoing_[next_];
    if (rest.empty()) continue;
    if (port.unreleased() >= kMostUnreleased) return Step::kBlocked;
    const size_t bytes = std::min<size_t>(rest.size(), kChunkBytes);
    const BufferRef buffer = port.allocate(bytes);
    std::memcpy(buffer->data, rest.data(), bytes);
    port.send(next_, 0, buffer, bytes);
    rest = rest.subspan(bytes);
    return Step::kWorked;
  }
  return Step::kIdle;
}

std::optional<Length> Relay::due(int source, int /*part*/) const {
  const size_t rest = incoming_[source].size();
  if (rest == 0) return {};
  const auto bytes = static_cast<int64_t>(std::min<size_t>(rest, kChunkBytes));
  return Length{bytes, bytes};
}

void Relay::take(int /*part*/, Arrival arrival) {
  auto& rest = incoming_[arrival.source];
  std::memcpy(rest.data(), arrival.bytes.data(), arrival.bytes.size());
  rest = rest.subspan(arrival.bytes.size());
}

bool Relay::finished() const {
  const auto empty = [](const auto& rest) { return rest.empty(); };
  return std::all_of(outgoing_.begin(), outgoing_.end(), empty) &&
         std::all_of(incoming_.begin(), incoming_.end(), empty);
}

bool Relay::waits_for(int rank) const { return !incoming_[rank].empty(); }

}  // namespace cgx
