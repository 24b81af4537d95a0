// Several works as one: what endCoalescing() returns.
#ifndef CGX_TORCH_OPS_JOINT_WORK_H_
#define CGX_TORCH_OPS_JOINT_WORK_H_

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace cgx::torch_ops {

// Ends when all have ended, with the first failure among them; its result is all their tensors.
c10::intrusive_ptr<c10d::Work> join_works(std::vector<c10::intrusive_ptr<c10d::Work>> works);

}  // namespace cgx::torch_ops

#endif  // CGX_TORCH_OPS_JOINT_WORK_H_
