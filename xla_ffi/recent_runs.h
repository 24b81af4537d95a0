// Values of the last runs of a program.
//
// XLA numbers runs (launches on all devices) but does not report their end, so the value of a run
// is kept until enough newer runs have started. XLA:CPU queues at most 32 executions on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

namespace cgx::xla {

template <typename T>
class RecentRuns {
 public:
  // Returns the value of `run`, or nullptr if the run is unknown or too old.
  T* Find(int64_t run) {
    for (auto entry = runs_.rbegin(); entry != runs_.rend(); ++entry) {
      if (entry->first == run) return &entry->second;
    }
    return nullptr;
  }

  T* Add(int64_t run, T value) {
    if (runs_.size() == kCapacity) runs_.pop_front();
    return &runs_.emplace_back(run, std::move(value)).second;
  }

 private:
  static constexpr size_t kCapacity = 64;
  std::deque<std::pair<int64_t, T>> runs_;  // oldest first
};

}  // namespace cgx::xla
