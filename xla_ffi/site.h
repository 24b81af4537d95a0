// A call site: one collective's custom call in one executable, created by XLA's Instantiate stage.
//
// Parses the attributes once, and assigns two identities to the site:
//   serial    unique in this process; with XLA's RunId it identifies a collective among the devices
//             of one process
//   instance  the index of this site among those of the same call id in one executable; "<call
//             id>#<instance>" identifies a collective among processes. A function that is lowered
//             once and called 32 times has 32 sites with equal attributes. Only their order of
//             instantiation distinguishes them: XLA instantiates in the order of the program.
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

class Rendezvous;

// The devices that reduce together, and their processes.
struct Group {
  int64_t index;                 // among the groups of the mesh axes
  std::vector<int64_t> members;  // partition ids, in rank order
  // Empty if all members are in this process. Otherwise the processes, in order of appearance, and
  // for each member the index of its process and its index among that process's members.
  std::vector<int32_t> processes;
  std::vector<int64_t> process_of, place_of;
  std::vector<std::vector<int64_t>> members_of;  // by process: ranks in the group

  // Returns whether a process has several members, which are reduced first.
  bool hierarchical() const { return processes.size() > 1 && processes.size() < members.size(); }
};

class Site {
 public:
  static ffi::TypeId id;  // for CPUs

  // Throws StatusError if an attribute is missing or has the wrong type.
  explicit Site(const ffi::Dictionary& attributes);
  ~Site();

  // The position of a partition. Find() throws StatusError if no group contains it.
  struct Place {
    const Group* group;
    int64_t rank;
  };
  Place Find(int64_t partition) const;
  // Returns the partition that runs on the device with this id. Throws StatusError.
  int64_t PartitionOf(int64_t device) const;
  const std::vector<int64_t>& devices() const { return devices_; }  // ids by partition

  // Returns the index of this execution of the site by a partition within a run: 0, 1, ... in a
  // loop.
  int64_t NextOccurrence(int64_t run, int64_t partition);

  // Returns the rendezvous of a group's members in this process for one of its collectives. Forget
  // it after the last member has found it.
  std::shared_ptr<Rendezvous> FindRendezvous(int64_t run, const Group& group, int64_t process,
                                             int64_t occurrence, double timeout_s);
  void ForgetRendezvous(int64_t run, const Group& group, int64_t occurrence);

  int64_t serial() const { return serial_; }
  // Returns the name of the group's collectives among processes.
  std::string NameOf(const Group& group) const;
  bool named() const { return named_; }  // whether the user named it
  // Returns text for errors, such as "psum_q 'jit_step/0:1f2e3d4c#0' on rank 1 of 2".
  std::string Describe(const Place& place) const;
  const Signature& signature() const { return signature_; }

 private:
  std::vector<Group> groups_;
  std::vector<int64_t> devices_;  // empty if XLA passes the partition to a handler
  Signature signature_;
  bool named_;
  int64_t serial_;
  std::string name_;  // "<call id>#<instance>"

  std::mutex mutex_;
  // Guarded by mutex_. For each run: the number of executions by partition, and the rendezvous by
  // (group, occurrence).
  RecentRuns<std::map<int64_t, int64_t>> occurrences_;
  RecentRuns<std::map<std::pair<int64_t, int64_t>, std::shared_ptr<Rendezvous>>> rendezvous_;
};

// A site on GPUs. XLA's GPU plugin numbers types separately, so its sites need a separate type.
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

// Mark the begin and the end of compilations. XLA instantiates on its own threads and does not
// report for which executable. Instances are counted from 0 again when a compilation begins or ends
// and no other is running. While several threads compile at the same time, counting continues:
// instances stay distinct, but if two threads compile the same function, its numbers depend on
// their order. cgx_ops/jax/_src/runtime/handlers.py prevents this among several processes.
void CompilationBegins();
void CompilationEnds();

}  // namespace cgx::xla
