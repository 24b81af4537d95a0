#include "algorithm/reduce.h"

#include <algorithm>

#include "kernel/kernels.h"

namespace cgx {
namespace {

constexpr int64_t kBlockNumel = 4096;  // 16 KB of fp32

}  // namespace

int64_t Reducer::block_numel(const Piece& piece) {
  const int64_t grain =
      std::max({piece.intra->grain(), piece.scatter->grain(), piece.gather->grain()});
  return std::max(grain, kBlockNumel / grain * grain);
}

float* Reducer::reduce_block(const Plan& plan, std::span<const Contribution> contributions,
                             bool divide, int64_t first, int64_t numel) {
  if (static_cast<int64_t>(sum_.size()) < numel) sum_.resize(numel);
  float* sum = sum_.data();
  const bool adds = plan.op == Op::kSum || plan.op == Op::kAvg;
  // The block of a contribution: where it begins, and its bytes.
  const auto block = [&](const Contribution& from) {
    const int64_t at = from.compressor->max_bytes(first);
    return std::span(from.data + at, from.compressor->max_bytes(first + numel) - at);
  };
  const auto decode = [&](const Contribution& from, float* into) {
    if (from.compressor) {
      const auto bytes = block(from);
      from.compressor->decode(bytes.data(), bytes.size(), numel, Dtype::kFloat32, into);
    } else {
      kernels().convert(plan.dtype, from.data + plan.bytes(first), Dtype::kFloat32, into, numel);
    }
  };
  const auto add = [&](const Contribution& from, const float* base) {
    if (from.compressor) {
      const auto bytes = block(from);
      from.compressor->decode_add(bytes.data(), bytes.size(), numel, base, sum);
    } else {
      kernels().add(plan.dtype, from.data + plan.bytes(first), base, sum, numel);
    }
  };
  // Values that are fp32 as they lie are a sum's beginning where they lie, as the first or (a + b
  // is b + a) as the second.
  const auto in_place = [&](const Contribution& from) {
    const bool is = adds && !from.compressor && plan.dtype == Dtype::kFloat32;
    return is ? reinterpret_cast<const float*>(from.data + plan.bytes(first)) : nullptr;
  };
  size_t done = 1;
  if (contributions.size() < 2) {
    decode(contributions[0], sum);
  } else if (const float* base = in_place(contributions[0])) {
    add(contributions[done++], base);
  } else if (const float* base = in_place(contributions[1])) {
    add(contributions[0], base);
    ++done;
  } else {
    decode(contributions[0], sum);
  }
  for (const auto& from : contributions.subspan(done)) {
    if (adds) {
      add(from, sum);
    } else {
      if (static_cast<int64_t>(other_.size()) < numel) other_.resize(numel);
      decode(from, other_.data());
      kernels().combine(plan.op, other_.data(), sum, numel);
    }
  }
  if (divide && plan.op == Op::kAvg) kernels().divide(sum, static_cast<float>(plan.divisor), numel);
  return sum;
}

}  // namespace cgx
