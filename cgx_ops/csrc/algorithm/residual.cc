#include "algorithm/residual.h"

#include <algorithm>
#include <vector>

#include "kernel/kernels.h"

namespace cgx {
namespace {

constexpr int64_t kBlockNumel = 4096;  // as in reduce.cc

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

const Compressor& compressor_of(const Piece& piece, Way way) {
  if (way == Way::kIntra) return *piece.intra;
  return way == Way::kScatter ? *piece.scatter : *piece.gather;
}

}  // namespace

void write_error(const Plan& plan, const Piece& piece, Way way, const std::byte* values,
                 const std::byte* message) {
  const Compressor& compressor = compressor_of(piece, way);
  const int64_t grain = compressor.grain();
  const int64_t block = std::max(grain, kBlockNumel / grain * grain);
  for (int64_t first = 0; first < piece.numel; first += block) {
    const int64_t numel = std::min(block, piece.numel - first);
    const int64_t at = compressor.max_bytes(first);
    const int64_t bytes = compressor.max_bytes(first + numel) - at;
    scratch.reserve(numel);
    kernels().convert(plan.dtype, values + plan.bytes(first), Dtype::kFloat32,
                      scratch.values.data(), numel);
    write_error(plan, piece, way, scratch.values.data(), first, numel,
                {message + at, static_cast<size_t>(bytes)});
  }
}

void write_error(const Plan& plan, const Piece& piece, Way way, const float* sums, int64_t first,
                 int64_t numel, std::span<const std::byte> encoded) {
  const bool divided = way == Way::kGather && plan.op == Op::kAvg;
  scratch.reserve(numel);
  float* decoded = scratch.decoded.data();
  compressor_of(piece, way).decode(encoded.data(), encoded.size(), numel, Dtype::kFloat32, decoded);
  kernels().lost(sums, divided ? static_cast<float>(plan.divisor) : 1.0f, decoded, numel);
  kernels().convert(Dtype::kFloat32, decoded, plan.dtype, piece.error + plan.bytes(first), numel);
}

}  // namespace cgx
