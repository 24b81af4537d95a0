#include "algorithm/feedback.h"

#include <algorithm>
#include <vector>

#include "algorithm/reduce.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

// Used within one call only: a collective's steps may run on any thread.
thread_local std::vector<float> compensated_block, decoded_block;

}  // namespace

void add_residual(Dtype dtype, const std::byte* values, const std::byte* residual, int64_t numel,
                  float* sum) {
  const float* base = reinterpret_cast<const float*>(values);
  if (dtype != Dtype::kFloat32) {
    kernels().convert(dtype, values, Dtype::kFloat32, sum, numel);
    base = sum;
  }
  kernels().add(dtype, residual, base, sum, numel);
}

int64_t encode_with_residual(const Plan& plan, const Piece& piece, Way way, const std::byte* values,
                             const Rounding& rounding, std::byte* to) {
  const Codec& codec = *piece.coded[way].codec;
  const int64_t block = block_numel(piece);
  int64_t bytes = 0;
  for (int64_t first = 0; first < piece.numel; first += block) {
    const int64_t numel = std::min(block, piece.numel - first);
    float* compensated = room(compensated_block, numel);
    const int64_t at = plan.bytes(first);
    add_residual(plan.dtype, values + at, piece.residual + at, numel, compensated);
    const int64_t written = codec.encode(Dtype::kFloat32, compensated, numel,
                                         piece.first_index + first, rounding, to + bytes);
    keep_residual(plan, piece, way, compensated, first, numel,
                  {to + bytes, static_cast<size_t>(written)});
    bytes += written;
  }
  return bytes;
}

void keep_residual(const Plan& plan, const Piece& piece, Way way, const float* sums, int64_t first,
                   int64_t numel, std::span<const std::byte> encoded) {
  const bool divided = way == Way::kGather && plan.op == Op::kAvg;
  float* decoded = room(decoded_block, numel);
  piece.coded[way].codec->decode(encoded, numel, Dtype::kFloat32, decoded);
  kernels().lost(sums, decoded, divided ? static_cast<float>(plan.divisor) : 1.0f, plan.dtype,
                 piece.residual + plan.bytes(first), numel);
}

}  // namespace cgx
