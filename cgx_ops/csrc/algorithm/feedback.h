// Error feedback (cgx_collective_t.residuals): the quantization error of a rank's values is added
// to its next values. This is the only file of the core with arithmetic on residuals; algorithms
// only call it where values are encoded or summed.
//
// Residuals are updated in place. That is safe because an algorithm uses each of a rank's own
// values once, either to encode it or to add it to a sum, and reads the residual before writing it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "algorithm/layout.h"
#include "plan.h"

namespace cgx {

// sum = values + residual, both of `dtype`, in fp32. `sum` may be the residual's memory.
void add_residual(Dtype dtype, const std::byte* values, const std::byte* residual, int64_t numel,
                  float* sum);

// Encodes a piece's own values plus their residual, and updates the residual. Returns the bytes
// written.
int64_t encode_with_residual(const Plan& plan, const Piece& piece, Stage stage,
                             const std::byte* values, const Rounding& rounding, std::byte* to);

// Encodes sums, beginning at element `first` of the piece, and updates their residual. For avg the
// error is multiplied by the divisor, because residuals are in units of the input. Returns the
// bytes written.
int64_t encode_sums_with_residual(const Plan& plan, const Piece& piece, Stage stage,
                                  const float* sums, int64_t first, int64_t numel,
                                  const Rounding& rounding, std::byte* to);

}  // namespace cgx
