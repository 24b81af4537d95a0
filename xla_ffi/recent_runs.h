// What is remembered of the last runs of a program.
//
// XLA names a run (one launch on all its devices) but never says that it is over, so what belongs
// to a run is kept until enough newer runs have come. XLA:CPU lets at most 32 executions queue up
// on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

namespace cgx::xla {

template <typename T>
class RecentRuns {
 public:
  // The value of `run`, or nullptr if the run is unknown (or long past).
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
