// The state of one collective in flight on one rank: key, algorithm, received headers, deadline.
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
  // Set by the caller.
  std::string name;
  int64_t occurrence = -1;  // < 0: counted by the engine
  Agreement agreement;
  std::unique_ptr<Algorithm> algorithm;
  std::vector<int> members;  // participating ranks of the communicator, this one included
  std::chrono::duration<double> timeout{0};
  // It only compares arguments with one other rank, and no call waits for it. So the loss of that
  // rank ends it alone, and so does closing the communicator.
  bool announcement = false;
  Refused refusal;                        // set if this rank refuses to take part
  bool counts = true;                     // whether totals include it; false for setup of
                                          // communicators
  int64_t bytes_in = 0, bytes_plain = 0;  // as in cgx_comm_info_t

  // Called at the end. Guarded by the engine's mutex.
  cgx_callback_t callback = nullptr;
  void* context = nullptr;

  // Used by the thread that holds the engine's progress role.
  Key key;
  Clock::time_point started, agreed_at, deadline;
  Clock::duration computed{0};  // time spent in the algorithm
  uint32_t serial = 0;
  std::vector<std::optional<Header>> headers;  // per rank
  int missing_headers = 0;
  bool agreed = false;  // all headers have arrived and match
  bool queued = false;  // in the run queue
  std::shared_ptr<SendState> sends;
  std::vector<std::array<uint32_t, 2>> sent;   // messages so far, per destination and part
  std::vector<std::pair<int, Arrival>> early;  // bulk messages that arrived before a header
  std::optional<Error> shortage;               // why this rank cannot continue, e.g. out of memory
  // Answers to the inquiry after the deadline, per rank: the ranks it waits for. Empty: no inquiry.
  std::vector<std::optional<std::vector<int32_t>>> answers;

  // The result: written before `done`, read after it.
  cgx_status_t status = CGX_OK;
  std::string error;
  std::atomic<bool> done{false};

  // Used by the communicator.
  std::atomic<bool> notified{false};      // a callback was registered
  std::atomic<bool> calling_back{false};  // a callback that was registered after the end is running
};

// The channel of a bulk message: the sender's serial of the collective, and the part.
inline constexpr uint32_t kSerials = kChannels / 2;  // distinguished by channels
inline uint32_t channel_of(uint32_t serial, int part) { return serial % kSerials * 2 + part; }

// Statistics of a communicator's successful collectives on one rank.
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
