// A collective as a sequence of kernel launches. Messages of a shard are cut into chunks of a
// wire's slot size. Round k handles chunk k of every shard. It follows sra or one_shot on CPUs
// (algorithm/), with bit-identical results:
//
//   sra        encode for each owner | exchange | reduce my shard and encode the sum for all |
//              exchange | decode. reduce_scatter is the first half, all_gather the second.
//   one_shot   encode for all | exchange | reduce all ranks' messages to values
#pragma once

#include <cstdint>

#include "algorithm/layout.h"
#include "device/wire.h"
#include "plan.h"

namespace cgx::device {

class Rounds {
 public:
  // The plan's algorithm must be sra or one_shot, and its chunk_bytes the wire's slot size. Throws
  // Error(CGX_UNSUPPORTED) if a bucket does not fit a slot.
  explicit Rounds(Plan plan);

  // At least one, because ranks without data must take part in the agreement.
  int64_t count() const { return count_; }
  void run(int64_t round, Wire& wire, Lane& lane) const;

 private:
  struct At;  // a round and its lane
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

// The collective of one rank: copies, adds residuals and divides for avg. Nothing is encoded, so
// new residuals are 0.
void pass_through(const Plan& plan, Queue& queue);

}  // namespace cgx::device
