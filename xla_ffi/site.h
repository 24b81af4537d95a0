// A call site: one collective's custom call in one executable, made by XLA's Instantiate stage.
//
// Parses the attributes once and gives the site its two identities:
//   serial    unique in this process; with XLA's RunId it names a collective among the devices of
//             one process
//   instance  the number of this site among those of the same call id in one executable; "<call
//             id>#<instance>" names a collective among processes. A function that is lowered once
//             and called 32 times gives 32 sites with equal attributes, which only their order of
//             instantiation tells apart: XLA instantiates in the order of the compiled program.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cgx/cgx.h"
#include "core.h"
#include "recent_runs.h"
#include "xla/ffi/api/ffi.h"

namespace cgx::xla {

class Meeting;

// The devices that reduce together, and where they are.
struct Group {
  int64_t index;                 // among the groups of the mesh axes
  std::vector<int64_t> members;  // partition ids, in rank order
  // Empty if all members are in this process. Else the processes, in the order in which they first
  // appear, and for each member the index of its process and its own among that process's members.
  std::vector<int32_t> processes;
  std::vector<int64_t> process_of, place_of;
  std::vector<std::vector<int64_t>> members_of;  // by process: ranks in the group

  // Some process has several members, which are reduced first.
  bool hierarchical() const { return processes.size() > 1 && processes.size() < members.size(); }
};

class Site {
 public:
  static ffi::TypeId id;  // on CPUs

  // Throws StatusError if an attribute is missing or has the wrong type.
  explicit Site(const ffi::Dictionary& attributes);
  ~Site();

  // Where a partition stands. Throws StatusError if no group holds it.
  struct Place {
    const Group* group;
    int64_t rank;
  };
  Place Find(int64_t partition) const;
  // The partition that runs on the device of this id. Throws StatusError.
  int64_t PartitionOf(int64_t device) const;
  const std::vector<int64_t>& devices() const { return devices_; }  // ids by partition

  // Counts the executions of this site by one partition within one run: 0, 1, ... in a loop.
  int64_t NextOccurrence(int64_t run, int64_t partition);

  // Where the members of a group in this process meet, for one of its collectives. Forget it once
  // nobody else will ask.
  std::shared_ptr<Meeting> FindMeeting(int64_t run, const Group& group, int64_t process,
                                       int64_t occurrence, double timeout_s);
  void ForgetMeeting(int64_t run, const Group& group, int64_t occurrence);

  int64_t serial() const { return serial_; }
  // Of the group's collectives among processes.
  std::string NameOf(const Group& group) const;
  bool named() const { return named_; }  // by the user
  // Such as "psum_q 'jit_step/0:1f2e3d4c#0' on rank 1 of 2", for error messages.
  std::string Describe(const Place& place) const;
  const Signature& signature() const { return signature_; }

 private:
  std::vector<Group> groups_;
  std::vector<int64_t> devices_;  // empty where XLA tells a handler its partition
  Signature signature_;
  bool named_;
  int64_t serial_;
  std::string name_;  // "<call id>#<instance>"

  std::mutex mutex_;
  // Guarded by mutex_: by run, executions so far by partition; meetings by (group, occurrence).
  RecentRuns<std::map<int64_t, int64_t>> occurrences_;
  RecentRuns<std::map<std::pair<int64_t, int64_t>, std::shared_ptr<Meeting>>> meetings_;
};

// A site on GPUs. XLA's GPU plugin numbers types by itself, so its sites need a type of their own.
class CudaSite : public Site {
 public:
  static ffi::TypeId id;
  using Site::Site;
};

// XLA's Instantiate stage.
template <typename T>
ffi::ErrorOr<std::unique_ptr<T>> MakeSite(ffi::Dictionary attributes) {
  try {
    return std::make_unique<T>(attributes);
  } catch (const std::exception& error) {
    return ffi::Unexpected(ToError(error));
  }
}

// Tell where executables begin and end, those of threads that lower collectives: XLA instantiates
// on threads of its own and does not say for which executable. Instances are counted from 0 again
// when a compilation begins or ends and no other is under way. While several threads compile at
// once, the counts run on: instances stay distinct, but a function that two of them compile gets
// numbers that depend on who was first.
void CompilationBegins();
void CompilationEnds();

}  // namespace cgx::xla
