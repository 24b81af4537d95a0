// reduce_scatter and all_gather: the public operators, which are each other's gradients, and their
// kernels. The shape of a result depends on the group's size, so kernels take that as an argument.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "allreduce.h"
#include "options.h"

namespace cgx::torch_ops {

// cgx::quantized_reduce_scatter: returns this rank's block of the sum or average of x over the
// ranks. The group's size must divide the first dimension.
at::Tensor quantized_reduce_scatter(const at::Tensor& x, CGX_PUBLIC_PARAMETERS);

// cgx::quantized_reduce_scatter_with_feedback: the same for x + residual. Also returns the new
// residual, of x's shape.
std::tuple<at::Tensor, at::Tensor> quantized_reduce_scatter_with_feedback(
    const at::Tensor& x, const at::Tensor& residual, CGX_PUBLIC_PARAMETERS);

// cgx::quantized_all_gather: concatenates the ranks' x along the first dimension, in rank order.
at::Tensor quantized_all_gather(const at::Tensor& x, std::optional<int64_t> bits,
                                std::optional<int64_t> bucket_size, std::string_view group_name,
                                std::optional<std::string_view> compressor,
                                std::optional<std::string_view> rounding, std::string_view config,
                                std::string_view name, std::string_view carrier);

// cgx::quantized_reduce_scatter_tensor: returns the block, then the new residual if one is given.
// Blocks as run() of kernels.h does. These functions serve the CPU and CUDA.
std::vector<at::Tensor> reduce_scatter_kernel(const at::Tensor& x, at::TensorList residuals,
                                              const Seed& seed, std::string_view call,
                                              int64_t group_size, std::string_view group_name);
// cgx::quantized_reduce_scatter_tensor_start: the same, but results may be read only after
// _c10d_functional.wait_tensor. Copies x, unless it is the `borrow` overload.
decltype(reduce_scatter_kernel) start_reduce_scatter_kernel;
decltype(reduce_scatter_kernel) borrow_reduce_scatter_kernel;
// The Meta kernel of all three.
decltype(reduce_scatter_kernel) reduce_scatter_meta;

// The same for cgx::quantized_all_gather_into_tensor.
at::Tensor all_gather_kernel(const at::Tensor& x, const Seed& seed, std::string_view call,
                             int64_t group_size, std::string_view group_name);
decltype(all_gather_kernel) start_all_gather_kernel;
decltype(all_gather_kernel) borrow_all_gather_kernel;
decltype(all_gather_kernel) all_gather_meta;

}  // namespace cgx::torch_ops
