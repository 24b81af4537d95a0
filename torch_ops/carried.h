// carrier="c10d": an allreduce whose messages torch's own collectives send. So it runs wherever
// torch.distributed does (torchrun, gloo, NCCL), and as functional collectives in graphs.
//
//   carried_encode -> all_to_all_single -> carried_reduce -> all_gather_into_tensor ->
//   carried_decode
//
// Small tensors use one_shot: carried_encode -> all_gather_into_tensor -> carried_decode. The core
// does the arithmetic (cgx.h, section 5): results and payloads are equal to those of the core's
// transports. In the all-gather, messages are padded to the longest one, by at most one bucket.
//
// The steps of CUDA tensors are enqueued on the current stream, and wait_tensor makes this stream
// wait for the collectives. So their memory needs no record_stream: it is used on one stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "options.h"

namespace cgx::torch_ops {

// The whole allreduce, by dispatcher calls. options.group_name is a torch.distributed group; "" is
// the default group. Returns the results, then the new residuals.
std::vector<at::Tensor> all_reduce_carried(at::TensorList xs, at::TensorList residuals,
                                           const Seed& seed, const Options& options);

// The kernels between the collectives, for the CPU and CUDA, and the Meta kernels. Messages are 1-D
// uint8 tensors. `bytes` is the planned size of the message that a step returns. `noise_rank` is
// the rank in the default group (see cgx.h). encode and reduce return a message, then the updated
// residuals: encode writes this rank's encoding error, and reduce adds that of the sum.
std::vector<at::Tensor> carried_encode_kernel(at::TensorList xs, at::TensorList residuals,
                                              int64_t bytes, const Seed& seed,
                                              std::string_view call, int64_t rank, int64_t size,
                                              int64_t noise_rank);
std::vector<at::Tensor> carried_reduce_kernel(at::TensorList xs, at::TensorList residuals,
                                              const at::Tensor& arrived, int64_t bytes,
                                              const Seed& seed, std::string_view call, int64_t rank,
                                              int64_t size, int64_t noise_rank);
// Uses only shapes and dtype of `like`; for one rank also its values, which are copied (or, for
// sign, voted on).
std::vector<at::Tensor> carried_decode_kernel(at::TensorList like, const at::Tensor& gathered,
                                              const Seed& seed, std::string_view call, int64_t rank,
                                              int64_t size, int64_t noise_rank);
decltype(carried_encode_kernel) carried_encode_meta;
decltype(carried_reduce_kernel) carried_reduce_meta;
decltype(carried_decode_kernel) carried_decode_meta;

}  // namespace cgx::torch_ops
