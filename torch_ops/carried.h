// carrier="c10d": an allreduce whose messages torch's own collectives send. So it runs wherever
// torch.distributed does (torchrun, gloo), and as functional collectives in graphs.
//
//   carried_encode -> all_to_all_single -> carried_reduce -> all_gather_into_tensor ->
//   carried_decode
//
// Small tensors use one_shot: carried_encode -> all_gather_into_tensor -> carried_decode. The core
// does the arithmetic (cgx.h, section 5): results and payloads are equal to those of the core's
// transports. In the all-gather, messages are padded to the longest one, by at most one bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "options.h"

namespace cgx::torch_ops {

// The whole allreduce, by dispatcher calls. options.group_name is a torch.distributed group; "" is
// the default group. Returns the results, then the new residuals.
std::vector<at::Tensor> all_reduce_carried(at::TensorList xs, at::TensorList residuals,
                                           const Seed& seed, const Options& options);

// The CPU and Meta kernels between the collectives. Messages are 1-D uint8 tensors. `bytes` is the
// planned size of the message that a step returns. `noise_rank` is the rank in the default group
// (see cgx.h). encode and reduce return a message, then the updated residuals: encode writes this
// rank's encoding error, and reduce adds that of the sum.
std::vector<at::Tensor> carried_encode_cpu(at::TensorList xs, at::TensorList residuals,
                                           int64_t bytes, const Seed& seed, std::string_view call,
                                           int64_t rank, int64_t size, int64_t noise_rank);
std::vector<at::Tensor> carried_reduce_cpu(at::TensorList xs, at::TensorList residuals,
                                           const at::Tensor& arrived, int64_t bytes,
                                           const Seed& seed, std::string_view call, int64_t rank,
                                           int64_t size, int64_t noise_rank);
// Uses only shapes and dtype of `like`; for one rank also its values, which are copied (or, for
// sign, voted on).
std::vector<at::Tensor> carried_decode_cpu(at::TensorList like, const at::Tensor& gathered,
                                           const Seed& seed, std::string_view call, int64_t rank,
                                           int64_t size, int64_t noise_rank);
decltype(carried_encode_cpu) carried_encode_meta;
decltype(carried_reduce_cpu) carried_reduce_meta;
decltype(carried_decode_cpu) carried_decode_meta;

}  // namespace cgx::torch_ops
