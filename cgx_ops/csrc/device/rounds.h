// A collective over a wire. Messages of a shard are cut into chunks of the wire's slot size. Round
// k handles chunk k of every shard:
//
//   sra        encode for each owner | exchange | reduce my shard and encode the sum for all |
//              exchange | decode. reduce_scatter is the first half, all_gather the second.
//   one_shot   encode for all | exchange | reduce all ranks' messages to values
//   all_to_all encode a block for each rank | exchange | decode the block from each rank
#pragma once

#include <cstdint>

#include "algorithm/layout.h"
#include "device/steps.h"
#include "device/wire.h"
#include "plan.h"

namespace cgx::device {

class Rounds {
 public:
  // The plan's algorithm must be sra or one_shot, and its chunk_bytes the wire's slot size. Throws
  // Error(CGX_UNSUPPORTED) if a bucket does not fit a slot.
  explicit Rounds(Plan plan);
  Rounds(const Rounds&) = delete;  // steps_ refers to the other members

  // At least one, because ranks without data must take part in the agreement. With splits, other
  // ranks may have more; all run the most, of which this rank's last ones are empty.
  int64_t count() const { return count_; }
  void run(int64_t round, Wire& wire, Lane& lane) const;

 private:
  void add(const Shard& shard);  // a message for each round
  bool one_shot() const { return plan_.algorithm == CGX_ONE_SHOT; }
  void exchange(int64_t round, Lane& lane, Traffic traffic) const;

  const Plan plan_;
  const Layout layout_;
  const Steps steps_;
  int64_t count_ = 1;
};

}  // namespace cgx::device
