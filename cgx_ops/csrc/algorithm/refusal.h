// The algorithm of a rank that refuses to take part: it does nothing.
#pragma once

#include "algorithm/algorithm.h"

namespace cgx {

class Refusal : public Algorithm {
 public:
  Step step(Port&) override { return Step::kIdle; }
  bool finished() const override { return true; }
  bool waits_for(int) const override { return false; }
  const char* phase() const override { return "refusal"; }
};

}  // namespace cgx
