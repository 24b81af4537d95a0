// Works made of other works.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace cgx::torch_ops {

// What endCoalescing() returns. Ends when all have ended, with the first failure among them; its
// result is all their tensors.
c10::intrusive_ptr<c10d::Work> join_works(std::vector<c10::intrusive_ptr<c10d::Work>> works);

// The work of `sum` and of the division of `results` by `divisor` after it. Whoever waits for it,
// or for its future, sees averages. For gloo, which itself has none of integers, and in older
// releases of torch none at all. In the tensor's own dtype; integers towards zero, as NCCL does it.
c10::intrusive_ptr<c10d::Work> averaged(c10::intrusive_ptr<c10d::Work> sum,
                                        std::vector<at::Tensor> results, int64_t divisor);

}  // namespace cgx::torch_ops
