// A collective as launches. Messages of a shard are cut into chunks as long as a wire's slot; round
// k is chunk k of every shard, and works like sra or one_shot on CPUs (algorithm/), to the same
// bits:
//
//   sra        encode for each owner | exchange | reduce my shard's, encode the sum for all |
//   exchange
//              | decode. reduce_scatter is the first half, all_gather the second.
//   one_shot   encode for all | exchange | reduce everybody's to values
#pragma once

#include <cstdint>

#include "algorithm/layout.h"
#include "device/wire.h"
#include "plan.h"

namespace cgx::device {

class Rounds {
 public:
  // The plan's algorithm is sra or one_shot, its chunk_bytes the wire's slot. Throws
  // Error(CGX_UNSUPPORTED) if a bucket does not fit into one.
  explicit Rounds(Plan plan);

  // At least one: ranks that have nothing to send must agree on that too.
  int64_t count() const { return count_; }
  void run(int64_t round, Wire& wire, Lane& lane) const;

 private:
  struct At;  // a round, where it runs
  bool one_shot() const { return plan_.algorithm == CGX_ONE_SHOT; }
  bool scatters() const { return plan_.verb->scatters; }
  bool gathers() const { return plan_.verb->gathers; }
  const std::byte* input(int owner) const;
  std::byte* output(int owner) const;

  void encode(const At& at) const;
  void reduce(const At& at) const;
  void decode(const At& at) const;
  void exchange(const At& at, Traffic traffic) const;

  const Plan plan_;
  const Layout layout_;
  RoundingMode rounding_ = RoundingMode::kNearest;  // of all segments
  int64_t count_ = 1;
};

// One rank alone: the identity, but that a residual is added and avg divides. Nothing is encoded,
// so nothing is lost.
void pass_through(const Plan& plan, Queue& queue);

}  // namespace cgx::device
