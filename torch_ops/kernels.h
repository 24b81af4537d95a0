// The kernels under the public operators: draw a seed, run or start a collective.
#ifndef CGX_TORCH_OPS_KERNELS_H_
#define CGX_TORCH_OPS_KERNELS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "options.h"

namespace cgx::torch_ops {

// Reduces `input` into `output`: contiguous, of one dtype and size, perhaps one tensor. Blocks.
// `seed` is needed if the options round stochastically. Checks nothing that Options::check did.
void run(const at::Tensor& input, const at::Tensor& output, const std::optional<at::Tensor>& seed,
         const Options& options);

// cgx::draw_seed: an int64 scalar from torch's default generator. The argument only tells draws
// apart (see draw_if_needed) and puts the operator on the CPU.
at::Tensor draw_seed(const at::Tensor& distinct);
at::Tensor draw_seed_meta(const at::Tensor& distinct);

// cgx::quantized_all_reduce: a new tensor with the result. Blocks.
at::Tensor all_reduce_cpu(const at::Tensor& x, const std::optional<at::Tensor>& seed, int64_t bits,
                          int64_t bucket_size, std::string_view op, std::string_view rounding,
                          std::string_view algorithm, int64_t gather_bits,
                          bool skip_incomplete_buckets, int64_t minimal_size, std::string_view name,
                          int64_t depth, std::string_view group_name);

// cgx::quantized_all_reduce_start: the same, to be read only after _c10d_functional.wait_tensor.
// Reduces from a copy of x, since who sees an ordinary operator may reuse x's memory at once.
at::Tensor start_cpu(const at::Tensor& x, const std::optional<at::Tensor>& seed, int64_t bits,
                     int64_t bucket_size, std::string_view op, std::string_view rounding,
                     std::string_view algorithm, int64_t gather_bits, bool skip_incomplete_buckets,
                     int64_t minimal_size, std::string_view name, int64_t depth,
                     std::string_view group_name);

// cgx::quantized_all_reduce_start.borrow: for callers who leave x's memory alone until the wait.
at::Tensor borrow_cpu(const at::Tensor& x, const std::optional<at::Tensor>& seed, int64_t bits,
                      int64_t bucket_size, std::string_view op, std::string_view rounding,
                      std::string_view algorithm, int64_t gather_bits, bool skip_incomplete_buckets,
                      int64_t minimal_size, std::string_view name, int64_t depth,
                      std::string_view group_name);

// The Meta kernel of all three: makes the same checks and starts nothing.
at::Tensor all_reduce_meta(const at::Tensor& x, const std::optional<at::Tensor>& seed, int64_t bits,
                           int64_t bucket_size, std::string_view op, std::string_view rounding,
                           std::string_view algorithm, int64_t gather_bits,
                           bool skip_incomplete_buckets, int64_t minimal_size,
                           std::string_view name, int64_t depth, std::string_view group_name);

}  // namespace cgx::torch_ops

#endif  // CGX_TORCH_OPS_KERNELS_H_
