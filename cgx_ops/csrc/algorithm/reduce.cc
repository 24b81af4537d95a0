#include "algorithm/reduce.h"

#include <algorithm>

#include "kernel/kernels.h"

namespace cgx {
namespace {

constexpr int64_t kBlockNumel = 4096;  // 16 KB of fp32

}  // namespace

int64_t Reducer::block_numel(const Piece& piece) {
  const int64_t grain = std::max(piece.scatter->grain(), piece.gather->grain());
  return std::max(grain, kBlockNumel / grain * grain);
}

float* Reducer::reduce_block(const Plan& plan, const Piece& piece,
                             std::span<const Contribution> contributions, bool divide,
                             int64_t first, int64_t numel) {
  if (static_cast<int64_t>(sum_.size()) < numel) sum_.resize(numel);
  float* sum = sum_.data();
  const bool adds = plan.op == Op::kSum || plan.op == Op::kAvg;
  const int64_t encoded_at = piece.scatter->max_bytes(first);
  const int64_t encoded_bytes = piece.scatter->max_bytes(first + numel) - encoded_at;
  const auto decode = [&](const Contribution& from, float* into) {
    if (from.raw)
      kernels().convert(plan.dtype, from.data + plan.bytes(first), Dtype::kFloat32, into, numel);
    else
      piece.scatter->decode(from.data + encoded_at, encoded_bytes, numel, Dtype::kFloat32, into);
  };
  decode(contributions[0], sum);
  for (const auto& from : contributions.subspan(1)) {
    if (!adds) {
      if (static_cast<int64_t>(other_.size()) < numel) other_.resize(numel);
      decode(from, other_.data());
      kernels().combine(plan.op, other_.data(), sum, numel);
    } else if (from.raw) {
      kernels().add(plan.dtype, from.data + plan.bytes(first), sum, numel);
    } else {
      piece.scatter->decode_add(from.data + encoded_at, encoded_bytes, numel, sum);
    }
  }
  if (divide && plan.op == Op::kAvg) kernels().divide(sum, static_cast<float>(plan.divisor), numel);
  return sum;
}

}  // namespace cgx
