// The public operators: compositions of the kernels of kernels.h, with their gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace cgx::torch_ops {

// The dispatcher takes plain functions, so each lists these. The schema in library.cc has them in
// the same order.
#define CGX_PUBLIC_PARAMETERS                                                                   \
  std::optional<int64_t> bits, std::optional<int64_t> bucket_size, std::string_view op,         \
      std::string_view group_name, std::optional<std::string_view> compressor,                  \
      std::optional<std::string_view> rounding, std::string_view config, std::string_view name, \
      std::string_view carrier

// Arguments of the constructor of Options after the op; verb: a cgx_verb_t.
#define CGX_GIVEN_OPTIONS(verb)               \
  /*depth=*/0,                                \
      overridden({.config = config,           \
                  .bits = bits,               \
                  .bucket_size = bucket_size, \
                  .compressor = compressor,   \
                  .rounding = rounding},      \
                 verb),                       \
      name, group_name, carrier, verb

// cgx::quantized_allreduce: x reduced over the ranks of the group, as a new tensor.
at::Tensor quantized_allreduce(const at::Tensor& x, CGX_PUBLIC_PARAMETERS);

// cgx::quantized_allreduce_: the same, written to x. Without a gradient and without a tracer it
// reduces in x's own memory.
void quantized_allreduce_(at::Tensor& x, CGX_PUBLIC_PARAMETERS);

// cgx::quantized_allreduce_coalesced: a list in one message, each tensor with its own buckets.
std::vector<at::Tensor> quantized_allreduce_coalesced(at::TensorList xs, CGX_PUBLIC_PARAMETERS);

// cgx::quantized_allreduce_with_feedback: (x + residual) reduced, and what that has lost of this
// rank's values, as new tensors; and the same of a list.
std::tuple<at::Tensor, at::Tensor> quantized_allreduce_with_feedback(const at::Tensor& x,
                                                                     const at::Tensor& residual,
                                                                     CGX_PUBLIC_PARAMETERS);
std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>>
quantized_allreduce_coalesced_with_feedback(at::TensorList xs, at::TensorList residuals,
                                            CGX_PUBLIC_PARAMETERS);

}  // namespace cgx::torch_ops
