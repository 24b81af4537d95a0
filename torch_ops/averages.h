// Averages by gloo, which itself has none of integers, and in older releases of torch none at all:
// its sum is divided once it is there, in the tensor's own dtype; integers towards zero, as NCCL
// does it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace cgx::torch_ops {

// The work of `sum` and of the division of `results` by `divisor` after it. Whoever waits for it,
// or for its future, sees averages.
c10::intrusive_ptr<c10d::Work> averaged(c10::intrusive_ptr<c10d::Work> sum,
                                        std::vector<at::Tensor> results, int64_t divisor);

}  // namespace cgx::torch_ops
