// The program launches with collectives among processes in flight, on each device.
//
// Executions that one Python thread launches on a device follow each other in the same order in all
// processes, so the n-th use of a key matches across processes. Launches of several threads
// overlap, and their order differs between processes. So overlapping calls without a user's name,
// or with the same name, are refused. The call that was first fails at its end: it may have matched
// a call of another launch in another process.
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

  // Returns whether, so far, no other launch had a call in flight that could match this one's
  // peers.
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
    "launches overlap on a device: several Python threads launch programs, in an order that may "
    "differ between processes. Give each thread's calls a separate name (name=), or launch from "
    "one "
    "thread";

}  // namespace cgx::xla
