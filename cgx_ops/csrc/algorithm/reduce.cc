#include "algorithm/reduce.h"

#include <algorithm>

#include "algorithm/feedback.h"
#include "base/status.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

// The encoded bytes of `numel` values from `first` on. Everything if the codec has no fixed length,
// because then the block is the whole piece.
Encoded block_of(const Contribution& from, int64_t first, int64_t numel) {
  const FixedLengthCodec* fixed = from.codec->fixed_length();
  if (!fixed) return from.message;
  return {from.message.source, fixed->slice(from.message.bytes, first, numel)};
}

template <typename Decode>
void naming(const Encoded& message, const Decode& decode) {
  try {
    decode();
  } catch (const Error& error) {
    fail(CGX_PEER_FAILED, "rank ", message.source, " sent a malformed message: ", error.what());
  }
}

}  // namespace

void decode(const Codec& codec, const Encoded& message, int64_t numel, int64_t first_index,
            Dtype dtype, void* values) {
  naming(message, [&] { codec.decode(message.bytes, numel, first_index, dtype, values); });
}

void decode_add(const Codec& codec, const Encoded& message, int64_t numel, int64_t first_index,
                const float* base, float* sum) {
  naming(message, [&] { codec.decode_add(message.bytes, numel, first_index, base, sum); });
}

int64_t block_numel(const Piece& piece, int64_t about) {
  int64_t grain = 1;
  for (const auto& coded : piece.coded.each) {
    if (!coded.codec->fixed_length()) return piece.numel;
    grain = std::max(grain, coded.codec->grain());
  }
  return std::max(grain, about / grain * grain);
}

float* Reducer::reduce_block(const Plan& plan, const Piece& piece,
                             std::span<const Contribution> contributions, bool divide,
                             int64_t first, int64_t numel) {
  float* sum = room(sum_, numel);
  const bool adds = plan.op == Op::kSum || plan.op == Op::kAvg;
  // This rank's own values, if they are among the contributions.
  Dtype own_dtype = plan.dtype;
  const std::byte* own = nullptr;
  for (const Contribution& from : contributions)
    if (!from.codec) own = from.message.bytes.data() + plan.bytes(first);
  if (own && piece.residual) {
    float* compensated = room(own_, numel);
    add_residual(plan.dtype, own, piece.residual + plan.bytes(first), numel, compensated);
    own_dtype = Dtype::kFloat32;
    own = reinterpret_cast<const std::byte*>(compensated);
  }
  const auto read = [&](const Contribution& from, float* into) {
    if (from.codec)
      decode(*from.codec, block_of(from, first, numel), numel, piece.first_index + first,
             Dtype::kFloat32, into);
    else
      kernels().convert(own_dtype, own, Dtype::kFloat32, into, numel);
  };
  const auto add = [&](const Contribution& from, const float* base) {
    if (from.codec)
      decode_add(*from.codec, block_of(from, first, numel), numel, piece.first_index + first, base,
                 sum);
    else
      kernels().add(own_dtype, own, base, sum, numel);
  };
  // Raw fp32 values can be used in place as the base of the sum, either as the first summand or,
  // since a + b = b + a, as the second.
  const auto in_place = [&](const Contribution& from) {
    const bool is = adds && !from.codec && own_dtype == Dtype::kFloat32;
    return is ? reinterpret_cast<const float*>(own) : nullptr;
  };
  size_t done = 1;
  if (contributions.size() < 2) {
    read(contributions[0], sum);
  } else if (const float* base = in_place(contributions[0])) {
    add(contributions[done++], base);
  } else if (const float* base = in_place(contributions[1])) {
    add(contributions[0], base);
    ++done;
  } else {
    read(contributions[0], sum);
  }
  for (const auto& from : contributions.subspan(done)) {
    if (adds) {
      add(from, sum);
    } else {
      float* other = room(other_, numel);
      read(from, other);
      kernels().combine(plan.op, other, sum, numel);
    }
  }
  if (divide && plan.op == Op::kAvg) kernels().divide(sum, static_cast<float>(plan.divisor), numel);
  return sum;
}

}  // namespace cgx
