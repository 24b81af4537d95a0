#include "algorithm/residual.h"

#include <algorithm>
#include <vector>

#include "algorithm/reduce.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

// Two blocks of fp32. Progress moves between threads, and a block is used within one call only.
struct Scratch {
  std::vector<float> values, decoded;
  void reserve(int64_t numel) {
    if (static_cast<int64_t>(values.size()) >= numel) return;
    values.resize(numel);
    decoded.resize(numel);
  }
};
thread_local Scratch scratch;

}  // namespace

void write_error(const Plan& plan, const Piece& piece, Way way, const std::byte* values,
                 std::span<const std::byte> message) {
  const SlicedCodec* sliced = piece.coded[way].codec->sliced();
  const int64_t block = block_numel(piece);
  for (int64_t first = 0; first < piece.numel; first += block) {
    const int64_t numel = std::min(block, piece.numel - first);
    scratch.reserve(numel);
    kernels().convert(plan.dtype, values + plan.bytes(first), Dtype::kFloat32,
                      scratch.values.data(), numel);
    write_error(plan, piece, way, scratch.values.data(), first, numel,
                sliced ? sliced->slice(message, first, numel) : message);
  }
}

void write_error(const Plan& plan, const Piece& piece, Way way, const float* sums, int64_t first,
                 int64_t numel, std::span<const std::byte> encoded) {
  const bool divided = way == Way::kGather && plan.op == Op::kAvg;
  scratch.reserve(numel);
  float* decoded = scratch.decoded.data();
  piece.coded[way].codec->decode(encoded, numel, Dtype::kFloat32, decoded);
  kernels().lost(sums, divided ? static_cast<float>(plan.divisor) : 1.0f, decoded, numel);
  kernels().convert(Dtype::kFloat32, decoded, plan.dtype, piece.error + plan.bytes(first), numel);
}

}  // namespace cgx
