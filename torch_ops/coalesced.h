// The kernels that reduce a list of tensors in one message, each tensor with a bucket grid of its
// own (a segment of the core). All of one dtype and device; an empty list sends nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

#include "options.h"

namespace cgx::torch_ops {

// Throws unless `options` can reduce each of the tensors, of the residuals too, and all can share a
// message: they are of one dtype, on one device.
void check_list(at::TensorList xs, at::TensorList residuals, const Options& options);
// Throws unless there is a residual for each tensor, of its shape, and it is a sum or average.
void check_pairs(at::TensorList xs, at::TensorList residuals, const Options& options);
// What a kernel of these tensors, and of residuals or none, is called with: checked.
Options checked_list(at::TensorList xs, at::TensorList residuals, const Seed& seed,
                     std::string_view call, std::string_view group_name);
// Their values end to end, in one new tensor; and back into tensors like those given.
at::Tensor pack(at::TensorList xs);
std::vector<at::Tensor> empty_like(at::TensorList xs);
void unpack(const at::Tensor& flat, at::TensorList into);
// Concrete sizes: how long messages are depends on them, so a graph is specialised to them.
std::vector<int64_t> numels_of(at::TensorList xs);

// cgx::quantized_all_reduce_coalesced: new tensors with the results, then the new residuals, if any
// are given. As run() of kernels.h.
std::vector<at::Tensor> all_reduce_coalesced_kernel(at::TensorList xs, at::TensorList residuals,
                                                    const Seed& seed, std::string_view call,
                                                    std::string_view group_name);

// cgx::quantized_all_reduce_coalesced_start: the same, each to be read only after
// _c10d_functional.wait_tensor. It packs at once, so the inputs' memory may be reused at once.
std::vector<at::Tensor> start_coalesced_kernel(at::TensorList xs, at::TensorList residuals,
                                               const Seed& seed, std::string_view call,
                                               std::string_view group_name);

// The Meta kernel of both.
std::vector<at::Tensor> all_reduce_coalesced_meta(at::TensorList xs, at::TensorList residuals,
                                                  const Seed& seed, std::string_view call,
                                                  std::string_view group_name);

}  // namespace cgx::torch_ops
