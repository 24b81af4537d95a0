// The public operators: compositions of the kernels of kernels.h, with their gradients.
#ifndef CGX_TORCH_OPS_ALLREDUCE_H_
#define CGX_TORCH_OPS_ALLREDUCE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace cgx::torch_ops {

// cgx::quantized_allreduce: x reduced over the ranks of the group, as a new tensor.
at::Tensor quantized_allreduce(const at::Tensor& x, int64_t bits, int64_t bucket_size,
                               std::string_view op, std::string_view group_name,
                               std::string_view rounding, std::string_view algorithm,
                               std::optional<int64_t> gather_bits, bool skip_incomplete_buckets,
                               int64_t minimal_size, std::string_view name);

// cgx::quantized_allreduce_: the same, written to x. Without a gradient and without a tracer it
// reduces in x's own memory.
void quantized_allreduce_(at::Tensor& x, int64_t bits, int64_t bucket_size, std::string_view op,
                          std::string_view group_name, std::string_view rounding,
                          std::string_view algorithm, std::optional<int64_t> gather_bits,
                          bool skip_incomplete_buckets, int64_t minimal_size,
                          std::string_view name);

// Has `hook` called before an operator becomes part of a graph; null: no longer.
void set_trace_hook(void (*hook)());

}  // namespace cgx::torch_ops

#endif  // CGX_TORCH_OPS_ALLREDUCE_H_
