// The kernels that reduce a list of tensors in one message, each tensor with a bucket grid of its
// own (a segment of the core). All of one dtype and device; an empty list sends nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "options.h"

namespace cgx::torch_ops {

// Throws unless the tensors can share a message: they are of one dtype, on one device.
void check_alike(at::TensorList xs);
// The same, and unless each can be reduced with `options` and `seed`.
void check_list(at::TensorList xs, const Seed& seed, const Options& options);
// Throws unless these are tensors that `options` can reduce and then their residuals: as many, of
// the same shapes, for a sum or average.
void check_pairs(at::TensorList pairs, const Options& options);
std::pair<at::TensorList, at::TensorList> halves(at::TensorList pairs);
// Their values end to end, in one new tensor; and back into tensors like those given.
at::Tensor pack(at::TensorList xs);
std::vector<at::Tensor> empty_like(at::TensorList xs);
void unpack(const at::Tensor& flat, at::TensorList into);
std::vector<int64_t> numels_of(at::TensorList xs);

// cgx::quantized_all_reduce_coalesced: new tensors with the results. As run() of kernels.h.
std::vector<at::Tensor> all_reduce_coalesced_kernel(at::TensorList xs, const Seed& seed,
                                                    std::string_view call,
                                                    std::string_view group_name);

// cgx::quantized_all_reduce_coalesced_start: the same, each to be read only after
// _c10d_functional.wait_tensor. It packs at once, so the inputs' memory may be reused at once.
std::vector<at::Tensor> start_coalesced_kernel(at::TensorList xs, const Seed& seed,
                                               std::string_view call, std::string_view group_name);

// cgx::quantized_all_reduce_with_feedback and its _start: of tensors and then their residuals, new
// tensors with the results and then the new residuals. The rest is as above.
std::vector<at::Tensor> all_reduce_with_feedback_kernel(at::TensorList pairs, const Seed& seed,
                                                        std::string_view call,
                                                        std::string_view group_name);
std::vector<at::Tensor> start_with_feedback_kernel(at::TensorList pairs, const Seed& seed,
                                                   std::string_view call,
                                                   std::string_view group_name);

// The Meta kernels.
std::vector<at::Tensor> all_reduce_with_feedback_meta(at::TensorList pairs, const Seed& seed,
                                                      std::string_view call,
                                                      std::string_view group_name);
std::vector<at::Tensor> all_reduce_coalesced_meta(at::TensorList xs, const Seed& seed,
                                                  std::string_view call,
                                                  std::string_view group_name);

}  // namespace cgx::torch_ops
