// Kernels that reduce a list of tensors in one message. Each tensor is a segment of the core, with
// its own buckets. All tensors have one dtype and device. An empty list sends nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

#include "options.h"

namespace cgx::torch_ops {

// Throws unless `options` can reduce all tensors and residuals, and all have one dtype and device.
void check_list(at::TensorList xs, at::TensorList residuals, const Options& options);
// Throws unless there is one residual of equal shape per tensor, and the op is sum or avg.
void check_pairs(at::TensorList xs, at::TensorList residuals, const Options& options);
// Checks a kernel's arguments and returns its options. `residuals` may be empty.
Options checked_list(at::TensorList xs, at::TensorList residuals, const Seed& seed,
                     std::string_view call, std::string_view group_name);
// Copies tensors into one new contiguous tensor, and back.
at::Tensor pack(at::TensorList xs);
std::vector<at::Tensor> empty_like(at::TensorList xs);
void unpack(const at::Tensor& flat, at::TensorList into);
// Concrete sizes. Message lengths depend on them, so a graph is specialized to them.
std::vector<int64_t> numels_of(at::TensorList xs);

// cgx::quantized_all_reduce_coalesced: returns the results, then the new residuals if residuals are
// given, all as new tensors. Blocks as run() of kernels.h does.
std::vector<at::Tensor> all_reduce_coalesced_kernel(at::TensorList xs, at::TensorList residuals,
                                                    const Seed& seed, std::string_view call,
                                                    std::string_view group_name);

// cgx::quantized_all_reduce_coalesced_start: the same, but results may be read only after
// _c10d_functional.wait_tensor. Inputs are copied, so their memory may be reused immediately.
std::vector<at::Tensor> start_coalesced_kernel(at::TensorList xs, at::TensorList residuals,
                                               const Seed& seed, std::string_view call,
                                               std::string_view group_name);

// The Meta kernel of both.
std::vector<at::Tensor> all_reduce_coalesced_meta(at::TensorList xs, at::TensorList residuals,
                                                  const Seed& seed, std::string_view call,
                                                  std::string_view group_name);

}  // namespace cgx::torch_ops
