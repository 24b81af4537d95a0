// Concatenates small segments whose codec has no fixed length, so that they share messages. Each
// message has a header and a state of its coder, which would be longer than the codes of a few
// values.
#pragma once

#include <memory>
#include <vector>

#include "algorithm/algorithm.h"
#include "plan.h"

namespace cgx {

class Packing {
 public:
  // Segments with equal settings that are small (Codec::packs_below) become one segment, in the
  // place of the first and with its seed. Its values, residuals and results are in the memory of
  // plan->packing, which stays null if there is nothing to pack. There, each rank's block of a
  // packed segment follows that of the rank before it.
  static void pack(Plan* plan);

  // Copies values and residuals to the packed segments, and results and residuals back.
  void load(const Plan& plan) const;
  void store_residuals(const Plan& plan) const;
  void store_results(const Plan& plan) const;

 private:
  struct Packed {
    std::vector<Segment> segments;
    std::vector<std::byte> values, residuals, results;
  };
  // Calls copy(packed, its offset, segment, its offset, bytes) for the values of each segment that
  // are in one piece: those of a block or, if `blocks` is false, all.
  template <typename Copy>
  void for_segments(const Plan& plan, bool blocks, const Copy& copy) const;

  std::vector<std::unique_ptr<Packed>> packed_;
};

// Wraps the algorithm of a plan with a packing.
std::unique_ptr<Algorithm> make_packed(const Plan& plan, std::unique_ptr<Algorithm> inner);

}  // namespace cgx
