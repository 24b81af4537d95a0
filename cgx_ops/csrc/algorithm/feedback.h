// Error feedback (cgx_collective_t.residuals): what compression has lost of a rank's values is
// added to them the next time they travel, and what is lost then is kept. No other file of the core
// does arithmetic on residuals; an algorithm only says where values are encoded or summed.
//
// A residual is read and written in place. That is safe because an algorithm takes each of a rank's
// own values once, either to encode it or to add it to a sum, and encodes before it writes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "algorithm/layout.h"
#include "plan.h"

namespace cgx {

// sum = values + residual, both of `dtype`, in fp32; then the sum may be the residual.
void add_residual(Dtype dtype, const std::byte* values, const std::byte* residual, int64_t numel,
                  float* sum);

// Encodes all of a piece's own values, which begin at `values`, with their residual; keeps what
// that loses. Returns the bytes written.
int64_t encode_with_residual(const Plan& plan, const Piece& piece, Way way, const std::byte* values,
                             const Rounding& rounding, std::byte* to);

// Encodes a block of sums, `first` elements into the piece; keeps what that loses. What avg has
// divided is multiplied again: residuals are in units of the input. Returns the bytes written.
int64_t encode_sums_keeping(const Plan& plan, const Piece& piece, Way way, const float* sums,
                            int64_t first, int64_t numel, std::byte* to);

}  // namespace cgx
