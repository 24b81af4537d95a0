// One collective in flight on one rank: its key, its algorithm, who has announced it, its deadline.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "algorithm/algorithm.h"
#include "header.h"

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
  cgx_callback_t callback = nullptr;
  void* context = nullptr;

  // Kept by the engine's progress role.
  Key key;
  Clock::time_point deadline;
  uint32_t serial = 0;
  std::vector<std::optional<Header>> headers;  // by rank
  int missing_headers = 0;
  bool agreed = false;  // all headers are here and equal
  bool queued = false;  // in the run queue
  std::shared_ptr<SendState> sends = std::make_shared<SendState>();
  std::vector<std::pair<int, Arrival>> early;  // bulk messages that overtook a header

  // The result: written before `done`, read after.
  cgx_status_t status = CGX_OK;
  std::string error;
  std::atomic<bool> done{false};
};

}  // namespace cgx
