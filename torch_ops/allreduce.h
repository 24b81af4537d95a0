// The public allreduce operators: compositions of the kernels of kernels.h, with gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

namespace cgx::torch_ops {

// The parameters that all public operators share, in the order of the schemas in library.cc. A
// macro, because the dispatcher requires plain functions.
#define CGX_PUBLIC_PARAMETERS                                                                   \
  std::optional<int64_t> bits, std::optional<int64_t> bucket_size, std::string_view op,         \
      std::string_view group_name, std::optional<std::string_view> compressor,                  \
      std::optional<std::string_view> rounding, std::string_view config, std::string_view name, \
      std::string_view carrier

// The constructor arguments of Options after op. `verb` is a cgx_verb_t.
#define CGX_GIVEN_OPTIONS(verb)               \
  /*depth=*/0,                                \
      overridden({.config = config,           \
                  .bits = bits,               \
                  .bucket_size = bucket_size, \
                  .compressor = compressor,   \
                  .rounding = rounding},      \
                 verb),                       \
      name, group_name, carrier, verb

// cgx::quantized_allreduce: reduces x over the ranks of the group and returns a new tensor.
at::Tensor quantized_allreduce(const at::Tensor& x, CGX_PUBLIC_PARAMETERS);

// cgx::quantized_allreduce_: the same, but writes the result to x. Reduces in x's own memory unless
// a gradient is recorded or a tracer is active.
void quantized_allreduce_(at::Tensor& x, CGX_PUBLIC_PARAMETERS);

// cgx::quantized_allreduce_coalesced: reduces a list of tensors in one message. Each tensor has its
// own buckets.
std::vector<at::Tensor> quantized_allreduce_coalesced(at::TensorList xs, CGX_PUBLIC_PARAMETERS);

// cgx::quantized_allreduce_with_feedback: reduces x + residual. Returns the result and this rank's
// new residual, both new tensors. The second function does the same for a list.
std::tuple<at::Tensor, at::Tensor> quantized_allreduce_with_feedback(const at::Tensor& x,
                                                                     const at::Tensor& residual,
                                                                     CGX_PUBLIC_PARAMETERS);
std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>>
quantized_allreduce_coalesced_with_feedback(at::TensorList xs, at::TensorList residuals,
                                            CGX_PUBLIC_PARAMETERS);

}  // namespace cgx::torch_ops
