#include "algorithm/feedback.h"

#include <algorithm>
#include <vector>

#include "algorithm/reduce.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

// Valid within one call only: steps of a collective may run on different threads.
thread_local std::vector<float> compensated_block, error_block;

// Encodes a block of a piece, beginning at element `first`. Its residual becomes the quantization
// error times `scale`.
int64_t encode_block(const Plan& plan, const Piece& piece, Stage stage, const float* values,
                     int64_t first, int64_t numel, const Rounding& rounding, float scale,
                     std::byte* to) {
  std::byte* residual = piece.residual + plan.bytes(first);
  const bool in_place = plan.dtype == Dtype::kFloat32 && scale == 1.0f;
  float* errors = in_place ? reinterpret_cast<float*>(residual) : room(error_block, numel);
  const int64_t bytes = piece.coded[stage].codec->encode_keeping(
      values, numel, piece.first_index + first, rounding, to, errors);
  if (!in_place) kernels().scale(errors, scale, plan.dtype, residual, numel);
  return bytes;
}

}  // namespace

void add_residual(Dtype dtype, const std::byte* values, const std::byte* residual, int64_t numel,
                  float* sum) {
  kernels().add_two(dtype, values, residual, sum, numel);
}

int64_t encode_with_residual(const Plan& plan, const Piece& piece, Stage stage,
                             const std::byte* values, const Rounding& rounding, std::byte* to) {
  // Small blocks, so that values, residual and their sum stay in the L1 cache, and the hardware
  // prefetcher gets ahead while a block is encoded. With fp32 the sum is computed in the residual's
  // memory, which may be a whole large piece.
  const int64_t block = block_numel(piece, 512);
  int64_t bytes = 0;
  for (int64_t first = 0; first < piece.numel; first += block) {
    const int64_t numel = std::min(block, piece.numel - first);
    const int64_t at = plan.bytes(first);
    std::byte* residual = piece.residual + at;
    float* compensated = plan.dtype == Dtype::kFloat32 ? reinterpret_cast<float*>(residual)
                                                       : room(compensated_block, numel);
    add_residual(plan.dtype, values + at, residual, numel, compensated);
    bytes +=
        encode_block(plan, piece, stage, compensated, first, numel, rounding, 1.0f, to + bytes);
  }
  return bytes;
}

int64_t encode_sums_with_residual(const Plan& plan, const Piece& piece, Stage stage,
                                  const float* sums, int64_t first, int64_t numel,
                                  const Rounding& rounding, std::byte* to) {
  const bool divided = stage == Stage::kGather && plan.op == Op::kAvg;
  return encode_block(plan, piece, stage, sums, first, numel, rounding,
                      divided ? static_cast<float>(plan.divisor) : 1.0f, to);
}

}  // namespace cgx
