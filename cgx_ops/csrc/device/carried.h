// The steps of an allreduce whose messages the caller sends (algorithm/carried.h) on a GPU: as
// kernel launches, with the same messages and results as on CPUs.
#pragma once

#include <span>

#include "algorithm/carried.h"
#include "device/queue.h"
#include "device/steps.h"

namespace cgx::device {

class CarriedSteps {
 public:
  // `carried` must be a CUDA call, and outlive the steps. Throws Error(CGX_UNSUPPORTED) if GPUs do
  // not support a codec.
  explicit CarriedSteps(const Carried& carried);

  void encode(Queue& queue, std::span<std::byte> messages) const;
  void reduce(Queue& queue, std::span<const std::byte> arrived, std::span<std::byte> message) const;
  void decode(Queue& queue, std::span<const std::byte> gathered) const;

 private:
  const Carried& carried_;
  const Steps steps_;
};

}  // namespace cgx::device
