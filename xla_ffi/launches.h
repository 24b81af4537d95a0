// Which launches of programs have collectives among processes in flight, on each device.
//
// Executions that one Python thread dispatches to a device follow each other, in every process
// alike, so the n-th use of a key means the same everywhere. Launches by several threads overlap,
// and which of them is first differs between processes: calls without a name of the user's are
// refused then, and calls of one name too. So is the call that was there first, at its end: it may
// have met another launch's of another process.
#pragma once

#include <cstdint>
#include <string>

namespace cgx::xla {

// A call of one launch (`run`) on one device, from its construction to its destruction.
class LaunchedCall {
 public:
  LaunchedCall(int32_t device, int64_t run, std::string name, bool named);
  ~LaunchedCall();
  LaunchedCall(const LaunchedCall&) = delete;
  LaunchedCall& operator=(const LaunchedCall&) = delete;

  // No other launch had a call in flight that this one could be taken for, so far.
  bool alone() const;
  // Ends it, and returns whether it was alone until then.
  bool Leave();

 private:
  const int32_t device_;
  const int64_t run_;
  const std::string name_;
  const bool named_;
  bool alone_ = true;
};

inline constexpr const char* kOverlap =
    "launches overlap on a device: several Python threads dispatch programs, in an order that may "
    "differ between processes. Give each thread's calls a name of their own (name=), or dispatch "
    "from one thread";

}  // namespace cgx::xla
