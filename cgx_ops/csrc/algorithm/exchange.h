// An all-gather of small blobs, for setting up communicators. The blobs are sent in the headers, so
// there are no other messages.
#pragma once

#include <memory>
#include <vector>

#include "algorithm/algorithm.h"

namespace cgx {

class Exchange : public Algorithm {
 public:
  // Writes blobs[rank]. `blobs` must outlive the collective.
  Exchange(int rank, Bytes mine, std::vector<Bytes>* blobs)
      : mine_(std::move(mine)), blobs_(blobs) {
    (*blobs_)[rank] = mine_;
  }
  Bytes eager() override { return mine_; }
  Step step(Port&) override { return Step::kIdle; }
  bool finished() const override { return true; }
  bool waits_for(int) const override { return false; }
  const char* phase() const override { return "exchange"; }

 private:
  bool awaits_eager(int, size_t) const override { return true; }  // the caller validates the blobs
  void take_eager(int source, Bytes payload) override { (*blobs_)[source] = std::move(payload); }

  Bytes mine_;
  std::vector<Bytes>* blobs_;
};

}  // namespace cgx
