#include "algorithm/chunks.h"

#include <algorithm>
#include <cstring>

#include "algorithm/residual.h"
#include "base/seeds.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

struct Encoding {
  const Compressor* compressor;
  int64_t at;  // bytes, in the chunk's message
  uint32_t phase;
};

Encoding encoding(const Piece& piece, Way way) {
  if (way == Way::kIntra) return {piece.intra, piece.intra_at, kIntraPhase};
  if (way == Way::kScatter) return {piece.scatter, piece.scatter_at, kScatterPhase};
  return {piece.gather, piece.gather_at, kGatherPhase};
}

// Encodes a block of sums, `first` elements into the piece. Returns where, and how many bytes.
std::span<const std::byte> encode_sums(const Plan& plan, const Piece& piece, Way way,
                                       const float* sums, int64_t first, int64_t numel,
                                       std::byte* message) {
  const auto [compressor, at, phase] = encoding(piece, way);
  std::byte* to = message + at + compressor->max_bytes(first);
  const int64_t bytes = compressor->encode(Dtype::kFloat32, sums, numel, piece.first_index + first,
                                           plan.rounding(piece.seed, phase), to);
  return {to, static_cast<size_t>(bytes)};
}

// values = values / divisor, in fp32.
void divide(const Plan& plan, std::byte* values, int64_t numel) {
  constexpr int64_t kBlockNumel = 4096;
  std::vector<float> block(std::min(numel, kBlockNumel));
  for (int64_t first = 0; first < numel; first += kBlockNumel) {
    const int64_t count = std::min(kBlockNumel, numel - first);
    std::byte* at = values + plan.bytes(first);
    kernels().convert(plan.dtype, at, Dtype::kFloat32, block.data(), count);
    kernels().divide(block.data(), static_cast<float>(plan.divisor), count);
    kernels().convert(Dtype::kFloat32, block.data(), plan.dtype, at, count);
  }
}

}  // namespace

void encode_chunk(const Plan& plan, const Shard& shard, const Chunk& chunk, Way way,
                  const std::byte* input, std::byte* message, int block) {
  for (const Piece& piece : shard.pieces_of(chunk)) {
    const auto [compressor, at, phase] = encoding(piece, way);
    compressor->encode(plan.dtype, input + piece.input_at, piece.numel, piece.first_index,
                       plan.rounding(block_seed(piece.seed, block), phase), message + at);
    if (piece.error) write_error(plan, piece, way, input + piece.input_at, message + at);
  }
}

void decode_chunk(const Plan& plan, const Shard& shard, const Chunk& chunk,
                  const std::byte* message, std::byte* output) {
  for (const Piece& piece : shard.pieces_of(chunk))
    piece.gather->decode(message + piece.gather_at, piece.gather->max_bytes(piece.numel),
                         piece.numel, plan.dtype, output + piece.output_at);
}

void pass_through(const Plan& plan) {
  for (const Segment& segment : plan.segments) {
    const size_t bytes = plan.bytes(segment.numel);
    if (bytes == 0) continue;
    std::memmove(plan.output + segment.output_at, plan.input + segment.input_at, bytes);
    if (plan.divides_alone()) divide(plan, plan.output + segment.output_at, segment.numel);
    if (segment.error) std::memset(segment.error, 0, bytes);
  }
}

template <typename Emit>
void ChunkReducer::reduce(const Shard& shard, const Chunk& chunk, Messages intra, Messages messages,
                          const std::byte* own, bool divide, const Emit& emit) {
  for (const Piece& piece : shard.pieces_of(chunk)) {
    contributions_.clear();
    const auto add = [&](Messages encoded, Way way) {
      const auto [compressor, at, phase] = encoding(piece, way);
      for (const std::byte* message : encoded)
        contributions_.push_back(message ? Contribution{message + at, compressor}
                                         : Contribution{own + piece.input_at, nullptr});
    };
    add(intra, Way::kIntra);
    add(messages, Way::kScatter);
    reducer_.reduce(
        plan_, piece, contributions_, divide,
        [&](const float* sums, int64_t first, int64_t numel) { emit(piece, sums, first, numel); });
  }
}

void ChunkReducer::to_values(const Shard& shard, const Chunk& chunk, Messages messages,
                             const std::byte* own, std::byte* output) {
  reduce(shard, chunk, {}, messages, own, true,
         [&](const Piece& piece, const float* sums, int64_t first, int64_t numel) {
           kernels().convert(Dtype::kFloat32, sums, plan_.dtype,
                             output + piece.output_at + plan_.bytes(first), numel);
         });
}

void ChunkReducer::to_gather_message(const Shard& shard, const Chunk& chunk, Messages messages,
                                     const std::byte* own, std::byte* message, std::byte* output,
                                     Messages intra) {
  reduce(shard, chunk, intra, messages, own, true,
         [&](const Piece& piece, const float* sums, int64_t first, int64_t numel) {
           const auto encoded =
               encode_sums(plan_, piece, Way::kGather, sums, first, numel, message);
           if (piece.error) write_error(plan_, piece, Way::kGather, sums, first, numel, encoded);
           if (output)
             piece.gather->decode(encoded.data(), encoded.size(), numel, plan_.dtype,
                                  output + piece.output_at + plan_.bytes(first));
         });
}

void ChunkReducer::to_scatter_message(const Shard& shard, const Chunk& chunk, Messages messages,
                                      const std::byte* own, std::byte* message, Messages intra) {
  reduce(shard, chunk, intra, messages, own, false,
         [&](const Piece& piece, const float* sums, int64_t first, int64_t numel) {
           const auto encoded =
               encode_sums(plan_, piece, Way::kScatter, sums, first, numel, message);
           if (piece.error) write_error(plan_, piece, Way::kScatter, sums, first, numel, encoded);
         });
}

}  // namespace cgx
