// carrier="c10d": the allreduce whose bytes torch's own collectives move, so that it runs wherever
// torch.distributed does (torchrun, gloo), and as ordinary functional collectives in graphs.
//
//   carried_encode -> all_to_all_single -> carried_reduce -> all_gather_into_tensor ->
//   carried_decode
//
// or, for small tensors (one_shot), carried_encode -> all_gather_into_tensor -> carried_decode. The
// core does the arithmetic (cgx.h, section 5): same bits and same payloads as its own transports. A
// rank's message of the all-gather is padded to the longest one's, at most a bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "options.h"

namespace cgx::torch_ops {

// The whole, by calls of the dispatcher. options.group_name is a group of torch.distributed, "" the
// default one. Results, then new residuals.
std::vector<at::Tensor> all_reduce_carried(at::TensorList xs, at::TensorList residuals,
                                           const Seed& seed, const Options& options);

// The kernels between the collectives, and their Meta kernels. Messages are 1-D uint8 tensors.
// bytes: of the message that a step returns, as the core plans it. noise_rank: as in cgx.h; of the
// default group. encode and reduce return a message, then the residuals as they are by now: what
// one has lost is completed by the other.
std::vector<at::Tensor> carried_encode_cpu(at::TensorList xs, at::TensorList residuals,
                                           int64_t bytes, const Seed& seed, std::string_view call,
                                           int64_t rank, int64_t size, int64_t noise_rank);
std::vector<at::Tensor> carried_reduce_cpu(at::TensorList xs, at::TensorList residuals,
                                           const at::Tensor& arrived, int64_t bytes,
                                           const Seed& seed, std::string_view call, int64_t rank,
                                           int64_t size, int64_t noise_rank);
// Of `like` only shapes and dtype are used, but by one rank alone, whose values it copies (or votes
// with).
std::vector<at::Tensor> carried_decode_cpu(at::TensorList like, const at::Tensor& gathered,
                                           const Seed& seed, std::string_view call, int64_t rank,
                                           int64_t size, int64_t noise_rank);
decltype(carried_encode_cpu) carried_encode_meta;
decltype(carried_reduce_cpu) carried_reduce_meta;
decltype(carried_decode_cpu) carried_decode_meta;

}  // namespace cgx::torch_ops
