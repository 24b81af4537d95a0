// What compression loses of this rank's values, for error feedback (cgx_collective_t.errors).
#pragma once

#include <cstddef>
#include <span>

#include "algorithm/layout.h"
#include "plan.h"

namespace cgx {

// Writes what encoding a piece's own values as `message` has lost of them.
void write_error(const Plan& plan, const Piece& piece, Way way, const std::byte* values,
                 std::span<const std::byte> message);

// The same for a block of sums, `first` elements into the piece. What avg has divided is multiplied
// again: errors are in units of the input.
void write_error(const Plan& plan, const Piece& piece, Way way, const float* sums, int64_t first,
                 int64_t numel, std::span<const std::byte> encoded);

}  // namespace cgx
