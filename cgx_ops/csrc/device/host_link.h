// The CPU communicator of a group of devices, as device/ sees it.
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
  // Returns all ranks' blobs, at most 4 KB each. Blocks until all ranks have called it, at most for
  // the timeout. Calls are matched by `what`.
  virtual std::vector<Bytes> exchange(const std::string& what, const Bytes& mine,
                                      std::chrono::duration<double> timeout) = 0;
  // Starts an algorithm between the CPUs, matched by (what, number). Never blocks. Calls the
  // callback once unless it throws.
  virtual void start(std::unique_ptr<Algorithm> algorithm, const std::string& what, uint64_t number,
                     const Agreement& agreement, std::chrono::duration<double> timeout,
                     cgx_callback_t callback, void* context) = 0;
};

}  // namespace cgx::device
