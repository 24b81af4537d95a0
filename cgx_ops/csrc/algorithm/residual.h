// What compression loses of this rank's values, for error feedback (cgx_collective_t.errors).
#pragma once

#include <cstddef>
#include <span>

#include "algorithm/layout.h"
#include "plan.h"

namespace cgx {

// Of a piece's own values, as their message decodes.
void write_error(const Plan& plan, const Piece& piece, Way way, const std::byte* values,
                 const std::byte* message);

// Of a block of sums, `first` elements into the piece, as `encoded` decodes. What avg has divided
// is multiplied again: errors are in units of the input.
void write_error(const Plan& plan, const Piece& piece, Way way, const float* sums, int64_t first,
                 int64_t numel, std::span<const std::byte> encoded);

}  // namespace cgx
