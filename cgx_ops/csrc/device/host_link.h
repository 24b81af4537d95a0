// The communicator on CPUs that a group of devices belongs to: device/ knows it as this.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "algorithm/algorithm.h"

namespace cgx::device {

class HostLink {
 public:
  virtual ~HostLink() = default;
  virtual const std::string& name() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // All ranks' blobs, at most 4 KB each. Blocks until all ranks call it, no longer than the
  // timeout; calls are matched by `what`.
  virtual std::vector<Bytes> exchange(const std::string& what, const Bytes& mine,
                                      std::chrono::duration<double> timeout) = 0;
  // Starts an algorithm between the CPUs, matched by (what, number). Never blocks; the callback is
  // called once unless this throws.
  virtual void start(std::unique_ptr<Algorithm> algorithm, const std::string& what, uint64_t number,
                     const Agreement& agreement, std::chrono::duration<double> timeout,
                     cgx_callback_t callback, void* context) = 0;
};

}  // namespace cgx::device
