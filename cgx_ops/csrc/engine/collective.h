// One collective in flight on one rank: its key, its algorithm, who has announced it, its deadline.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "algorithm/algorithm.h"
#include "base/status.h"
#include "engine/header.h"

namespace cgx {

using Clock = std::chrono::steady_clock;

struct Collective {
  // Given by the caller.
  std::string name;
  int64_t occurrence = -1;  // < 0: counted by the engine
  Agreement agreement;
  std::unique_ptr<Algorithm> algorithm;
  std::vector<int> members;  // ranks of the communicator that take part, this one included
  std::chrono::duration<double> timeout{0};
  Refused refusal;                        // if any, of this rank to take part
  bool counts = true;                     // in the totals; false: it only makes a communicator
  int64_t bytes_in = 0, bytes_plain = 0;  // as in cgx_comm_info_t

  // Who wants to know of the end; under the engine's mutex.
  cgx_callback_t callback = nullptr;
  void* context = nullptr;

  // Kept by the engine's progress role.
  Key key;
  Clock::time_point started, agreed_at, deadline;
  Clock::duration computed{0};  // in the algorithm
  uint32_t serial = 0;
  std::vector<std::optional<Header>> headers;  // by rank
  int missing_headers = 0;
  bool agreed = false;  // all headers are here and equal
  bool queued = false;  // in the run queue
  std::shared_ptr<SendState> sends;
  std::vector<std::array<uint32_t, 2>> sent;   // messages so far, by destination and part
  std::vector<std::pair<int, Arrival>> early;  // bulk messages that overtook a header
  std::optional<Error> shortage;  // of what this rank is short, so that it cannot go on
  // Of the inquiry after its deadline, by rank: for whom they wait. Empty: there is none.
  std::vector<std::optional<std::vector<int32_t>>> answers;

  // The result: written before `done`, read after.
  cgx_status_t status = CGX_OK;
  std::string error;
  std::atomic<bool> done{false};

  // Kept by the communicator.
  std::atomic<bool> notified{false};      // somebody has asked to be called back
  std::atomic<bool> calling_back{false};  // by who asked after the end
};

// A bulk message's channel: the sender's number of the collective, and the part.
inline constexpr uint32_t kSerials = kChannels / 2;  // that channels can tell apart
inline uint32_t channel_of(uint32_t serial, int part) { return serial % kSerials * 2 + part; }

// What the collectives of a communicator that ended well add up to, on one rank.
struct Totals {
  int64_t collectives = 0;
  int64_t bytes_in = 0, bytes_plain = 0;
  Clock::duration agree{0}, move{0}, compute{0};

  void add(const Collective& collective, Clock::time_point ended) {
    ++collectives;
    bytes_in += collective.bytes_in;
    bytes_plain += collective.bytes_plain;
    agree += collective.agreed_at - collective.started;
    move += ended - collective.agreed_at;
    compute += collective.computed;
  }
};

}  // namespace cgx
