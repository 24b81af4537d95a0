// Concatenates small segments of an allreduce whose codec has no fixed length, so that they share
// blocks. Each block has a header and a state of its coder, which would be longer than the codes of
// a few values.
#pragma once

#include <memory>
#include <vector>

#include "algorithm/algorithm.h"
#include "plan.h"

namespace cgx {

class Packing {
 public:
  // Segments with equal settings that are shorter than a block become one segment, in the place of
  // the first and with its seed. Its values and residuals are in the memory of plan->packing, which
  // stays null if there is nothing to pack.
  static void pack(Plan* plan);

  // Copies values and residuals to the packed segments, and results and residuals back.
  void load(const Plan& plan) const;
  void store_residuals(const Plan& plan) const;
  void store_results(const Plan& plan) const;

 private:
  struct Packed {
    std::vector<Segment> segments;
    std::vector<std::byte> values, residuals;  // values become results
  };
  // Calls copy(segment, its packed values, its packed residuals or null, bytes).
  template <typename Copy>
  void for_segments(const Plan& plan, const Copy& copy) const;

  std::vector<std::unique_ptr<Packed>> packed_;
};

// Wraps the algorithm of a plan with a packing.
std::unique_ptr<Algorithm> make_packed(const Plan& plan, std::unique_ptr<Algorithm> inner);

}  // namespace cgx
