// all_to_all: the public operator, which is its own gradient with the sizes exchanged, and its
// kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "options.h"

namespace cgx::torch_ops {

// cgx::quantized_all_to_all: sends a block of rows of x to each rank, and concatenates the blocks
// from all ranks. Sizes count rows; without them all blocks are equal. `grad_config` is the config
// of the gradient's collective, which is exact by default.
at::Tensor quantized_all_to_all(const at::Tensor& x, at::OptionalSymIntArrayRef output_split_sizes,
                                at::OptionalSymIntArrayRef input_split_sizes,
                                std::optional<int64_t> bits, std::optional<int64_t> bucket_size,
                                std::string_view group_name,
                                std::optional<std::string_view> compressor,
                                std::optional<std::string_view> rounding, std::string_view config,
                                std::string_view name, std::string_view carrier,
                                std::string_view grad_config);

// cgx::quantized_all_to_all_single: the same with all sizes. Blocks as run() of kernels.h does. On
// CUDA, ranks compare the sizes on the host, so the call waits for all ranks.
at::Tensor all_to_all_kernel(const at::Tensor& x, c10::SymIntArrayRef output_split_sizes,
                             c10::SymIntArrayRef input_split_sizes, const Seed& seed,
                             std::string_view call, std::string_view group_name);
// cgx::quantized_all_to_all_single_start: the same, but the result may be read only after
// _c10d_functional.wait_tensor. Copies x, unless it is the `borrow` overload.
decltype(all_to_all_kernel) start_all_to_all_kernel;
decltype(all_to_all_kernel) borrow_all_to_all_kernel;
// The Meta kernel of all three.
decltype(all_to_all_kernel) all_to_all_meta;

}  // namespace cgx::torch_ops
