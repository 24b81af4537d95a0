// A call site: one psum_q custom call of one executable, made by XLA's Instantiate stage.
//
// Parses the attributes once and gives the site its two identities:
//   serial    unique in this process; with XLA's RunId it names a collective among the devices of
//             one process
//   instance  the number of this site among those of the same call id in one executable; "<call
//             id>#<instance>" names a collective among processes. A function that is lowered once
//             and called 32 times gives 32 sites with equal attributes, which only their order of
//             instantiation tells apart: XLA instantiates in the order of the compiled program.
#ifndef CGX_XLA_FFI_SITE_H_
#define CGX_XLA_FFI_SITE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cgx/cgx.h"
#include "recent_runs.h"
#include "xla/ffi/api/ffi.h"

namespace cgx::xla {

namespace ffi = ::xla::ffi;

class Site {
 public:
  static ffi::TypeId id;

  // Throws StatusError if an attribute is missing or has the wrong type.
  explicit Site(const ffi::Dictionary& attributes);

  // Where a partition stands: its group's members, in rank order, and its own rank.
  struct Place {
    std::vector<int64_t> members;
    int64_t rank;
  };
  // Throws StatusError if no group holds the partition.
  Place Find(int64_t partition) const;

  // Counts the executions of this site by one partition within one run: 0, 1, ... in a loop.
  int64_t NextOccurrence(int64_t run, int64_t partition);

  // True if each device of the mesh belongs to a process of its own.
  bool across_processes() const { return !processes_.empty(); }
  int64_t process(int64_t partition) const { return processes_.at(partition); }

  int64_t serial() const { return serial_; }
  // "<call id>#<instance>"
  const std::string& name() const { return name_; }
  int64_t batch() const { return batch_; }
  int64_t bucket_size() const { return bucket_size_; }
  int32_t bits() const { return bits_; }

  // Everything that the attributes fix: op, algorithm, rounding and so on.
  cgx_collective_t collective() const { return collective_; }

 private:
  std::vector<int64_t> groups_;  // partition ids, group after group
  int64_t group_size_;
  std::vector<int64_t> processes_;  // process of each partition; empty: all in this process
  int64_t batch_;                   // equal segments in the operand: the examples of a vmap
  int64_t bucket_size_;
  int32_t bits_;
  cgx_collective_t collective_;
  int64_t serial_;
  std::string name_;

  std::mutex mutex_;
  RecentRuns<std::vector<int64_t>> occurrences_;  // guarded by mutex_; by partition
};

// Tell where executables begin and end: XLA instantiates on threads of its own and does not say for
// which executable. Instances are counted from 0 again when a compilation begins or ends and no
// other is under way. While several threads compile at once, the counts run on: instances stay
// distinct, but a function that two of them compile gets numbers that depend on who was first.
void CompilationBegins();
void CompilationEnds();

}  // namespace cgx::xla

#endif  // CGX_XLA_FFI_SITE_H_
