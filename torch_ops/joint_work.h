// Several works as one: what endCoalescing() returns.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace cgx::torch_ops {

// Ends when all have ended, with the first failure among them; its result is all their tensors.
c10::intrusive_ptr<c10d::Work> join_works(std::vector<c10::intrusive_ptr<c10d::Work>> works);

}  // namespace cgx::torch_ops
