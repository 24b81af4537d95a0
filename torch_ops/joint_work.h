// Works that combine other works.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace cgx::torch_ops {

// The Work that endCoalescing() returns. It ends when all works have ended, with the first failure
// among them. Its result holds all their tensors.
c10::intrusive_ptr<c10d::Work> join_works(std::vector<c10::intrusive_ptr<c10d::Work>> works);

// Returns a Work that divides `results` by `divisor` after `sum` has ended. Waiters and future
// callbacks see averages. gloo needs it: it cannot average integers and, in older torch releases,
// anything. Divides in the tensor's dtype; integers round towards zero, as with NCCL.
c10::intrusive_ptr<c10d::Work> averaged(c10::intrusive_ptr<c10d::Work> sum,
                                        std::vector<at::Tensor> results, int64_t divisor);

// Returns a Work that copies each tensor of `from` to that of `to` after `work` has ended. Its
// results are those of `to`.
c10::intrusive_ptr<c10d::Work> copied_back(c10::intrusive_ptr<c10d::Work> work,
                                           std::vector<at::Tensor> from,
                                           std::vector<at::Tensor> to);

}  // namespace cgx::torch_ops
