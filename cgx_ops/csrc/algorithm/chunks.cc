#include "algorithm/chunks.h"

#include <algorithm>
#include <cstring>

#include "algorithm/feedback.h"
#include "base/seeds.h"
#include "base/status.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

// Returns a piece's part of a chunk's message. Throws Error(CGX_PEER_FAILED) if the message is too
// short.
Encoded part_of(const Encoded& message, const Piece& piece, Stage stage) {
  const auto [codec, at] = piece.coded[stage];
  const FixedLengthCodec* fixed = codec->fixed_length();
  if (!fixed) return message;
  const int64_t end = at + fixed->offset(piece.numel);
  require(end <= static_cast<int64_t>(message.bytes.size()), CGX_PEER_FAILED, "rank ",
          message.source, " sent ", message.bytes.size(), " bytes, but ", end, " are due");
  return {message.source, message.bytes.subspan(at, end - at)};
}

// Encodes sums, beginning at element `first` of the piece, to their offset in `message`. Updates
// the residual if there is one.
std::span<const std::byte> encode_sums(const Plan& plan, const Piece& piece, Stage stage,
                                       const float* sums, int64_t first, int64_t numel,
                                       std::byte* message, int block) {
  const auto [codec, at] = piece.coded[stage];
  const FixedLengthCodec* fixed = codec->fixed_length();
  std::byte* to = message + at + (fixed ? fixed->offset(first) : 0);
  const Rounding rounding = plan.rounding(*piece.segment, block_seed(piece.seed, block), stage);
  const int64_t bytes =
      piece.residual
          ? encode_sums_with_residual(plan, piece, stage, sums, first, numel, rounding, to)
          : codec->encode(Dtype::kFloat32, sums, numel, piece.first_index + first, rounding, to);
  return {to, static_cast<size_t>(bytes)};
}

// output = (input + residual) / divisor, in fp32.
void compute_alone(const Plan& plan, const Segment& segment, const std::byte* input,
                   std::byte* output) {
  constexpr int64_t kBlockNumel = 4096;
  std::vector<float> block(std::min(segment.numel, kBlockNumel));
  for (int64_t first = 0; first < segment.numel; first += kBlockNumel) {
    const int64_t numel = std::min(kBlockNumel, segment.numel - first);
    const int64_t at = plan.bytes(first);
    if (segment.residual)
      add_residual(plan.dtype, input + at, segment.residual + at, numel, block.data());
    else
      kernels().convert(plan.dtype, input + at, Dtype::kFloat32, block.data(), numel);
    if (plan.divides_alone())
      kernels().divide(block.data(), static_cast<float>(plan.divisor), numel);
    kernels().convert(Dtype::kFloat32, block.data(), plan.dtype, output + at, numel);
  }
}

// Converts values or sums to votes: encodes and decodes them.
void vote(const Codec& codec, Dtype from_type, const void* from, int64_t numel, Dtype to_type,
          void* to, std::vector<std::byte>& bytes) {
  bytes.resize(codec.max_bytes(numel));
  codec.encode(from_type, from, numel, 0, {}, bytes.data());
  codec.decode(bytes, numel, 0, to_type, to);
}

// The vote of a single rank.
void vote_alone(const Plan& plan, const Segment& segment, const std::byte* input,
                std::byte* output) {
  std::vector<std::byte> bytes;
  vote(*make_codec(segment.codecs[Stage::kGather]), plan.dtype, input, segment.numel, plan.dtype,
       output, bytes);
}

}  // namespace

int64_t encode_chunk(const Plan& plan, const Shard& shard, const Chunk& chunk, Stage stage,
                     const std::byte* input, std::byte* message, int block) {
  int64_t end = 0;
  for (const Piece& piece : shard.pieces_of(chunk)) {
    const auto [codec, at] = piece.coded[stage];
    const std::byte* values = input + piece.input_at;
    const Rounding rounding = plan.rounding(*piece.segment, block_seed(piece.seed, block), stage);
    end = at + (piece.residual
                    ? encode_with_residual(plan, piece, stage, values, rounding, message + at)
                    : codec->encode(plan.dtype, values, piece.numel, piece.first_index, rounding,
                                    message + at));
  }
  return end;
}

void decode_chunk(const Plan& plan, const Shard& shard, const Chunk& chunk, Stage stage,
                  const Encoded& message, std::byte* output) {
  for (const Piece& piece : shard.pieces_of(chunk))
    decode(*piece.coded[stage].codec, part_of(message, piece, stage), piece.numel,
           piece.first_index, plan.dtype, output + piece.output_at);
}

void copy_own_block(const Plan& plan) {
  const auto& from = plan.sends[plan.rank];
  const auto& to = plan.receives[plan.rank];
  for (size_t i = 0; i < from.size(); ++i)
    if (from[i].numel > 0)
      std::memmove(plan.output + to[i].output_at, plan.input + from[i].input_at,
                   plan.bytes(from[i].numel));
}

void pass_through(const Plan& plan) {
  if (plan.verb->exchanges()) return copy_own_block(plan);
  for (const Segment& segment : plan.segments) {
    const size_t bytes = plan.bytes(segment.numel);
    if (bytes == 0) continue;
    const std::byte* input = plan.input + segment.input_at;
    std::byte* output = plan.output + segment.output_at;
    if (votes(segment.codecs[Stage::kGather]))
      vote_alone(plan, segment, input, output);
    else if (plan.divides_alone() || segment.residual)
      compute_alone(plan, segment, input, output);
    else
      std::memmove(output, input, bytes);
    if (segment.residual) std::memset(segment.residual, 0, bytes);
  }
}

template <typename Emit>
void ChunkReducer::reduce(const Shard& shard, const Chunk& chunk, Messages intra, Messages messages,
                          const std::byte* own, bool divide, const Emit& emit) {
  for (const Piece& piece : shard.pieces_of(chunk)) {
    contributions_.clear();
    const bool by_vote = votes(piece.segment->codecs[Stage::kGather]);
    const auto add = [&](Messages encoded, Stage stage) {
      for (const Encoded& message : encoded) {
        if (message.source == kOwnValues.source && by_vote)
          contributions_.push_back(own_vote(piece, own + piece.input_at));
        else if (message.source == kOwnValues.source)
          contributions_.push_back({{message.source, {own + piece.input_at, 0}}, nullptr});
        else
          contributions_.push_back({part_of(message, piece, stage), piece.coded[stage].codec});
      }
    };
    add(intra, Stage::kIntra);
    add(messages, Stage::kScatter);
    reducer_.reduce(
        plan_, piece, contributions_, divide,
        [&](const float* sums, int64_t first, int64_t numel) { emit(piece, sums, first, numel); });
  }
}

Contribution ChunkReducer::own_vote(const Piece& piece, const std::byte* own) {
  const Codec& codec = *piece.coded[Stage::kGather].codec;
  vote_.resize(codec.max_bytes(piece.numel));
  codec.encode(plan_.dtype, own, piece.numel, piece.first_index, {}, vote_.data());
  return {{kOwnValues.source, vote_}, &codec};
}

void ChunkReducer::to_values(const Shard& shard, const Chunk& chunk, Messages messages,
                             const std::byte* own, std::byte* output, Messages intra) {
  reduce(shard, chunk, intra, messages, own, true,
         [&](const Piece& piece, const float* sums, int64_t first, int64_t numel) {
           std::byte* const to = output + piece.output_at + plan_.bytes(first);
           // Values that are added without being encoded have no quantization error.
           if (own && piece.residual)
             std::memset(piece.residual + plan_.bytes(first), 0, plan_.bytes(numel));
           if (votes(piece.segment->codecs[Stage::kGather]))
             vote(*piece.coded[Stage::kGather].codec, Dtype::kFloat32, sums, numel, plan_.dtype, to,
                  result_);
           else
             kernels().convert(Dtype::kFloat32, sums, plan_.dtype, to, numel);
         });
}

int64_t ChunkReducer::to_message(Stage stage, const Shard& shard, const Chunk& chunk,
                                 Messages messages, const std::byte* own, std::byte* message,
                                 std::byte* output, Messages intra, int block) {
  int64_t end = 0;
  reduce(
      shard, chunk, intra, messages, own, /*divide=*/stage == Stage::kGather,
      [&](const Piece& piece, const float* sums, int64_t first, int64_t numel) {
        const auto encoded = encode_sums(plan_, piece, stage, sums, first, numel, message, block);
        end = encoded.data() + encoded.size() - message;
        if (output)
          piece.coded[stage].codec->decode(encoded, numel, piece.first_index + first, plan_.dtype,
                                           output + piece.output_at + plan_.bytes(first));
      });
  return end;
}

}  // namespace cgx
