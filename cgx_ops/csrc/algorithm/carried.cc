#include "algorithm/carried.h"

#include <algorithm>
#include <vector>

#include "algorithm/algorithm.h"
#include "algorithm/chunks.h"
#include "base/checks.h"

namespace cgx {
namespace {

Plan carried_plan(const cgx_collective_t& call, int rank, int size, BuffersUsed used) {
  require(size >= 1 && rank >= 0 && rank < size, CGX_INVALID_ARGUMENT, "rank is ", rank,
          " and size ", size, "; accepted: 0 <= rank < size");
  require(
      call.device == CGX_CPU, CGX_UNSUPPORTED, "device is ", call.device,
      ": what the caller carries is encoded on the CPU; give CGX_CPU, and values in its memory");
  Plan plan = make_plan(call, rank, size, used);
  require(plan.verb == CGX_ALLREDUCE, CGX_INVALID_ARGUMENT, "verb is ", call.verb,
          ": only an allreduce can be carried by its caller; give CGX_ALLREDUCE");
  require(plan.algorithm != CGX_RING && plan.algorithm != CGX_HIERARCHICAL, CGX_INVALID_ARGUMENT,
          "algorithm is ", plan.algorithm == CGX_RING ? "ring" : "hierarchical",
          ", which passes messages on: its caller cannot carry it; give auto, one_shot or sra");
  resolve_algorithm(&plan);
  return plan;
}

int64_t bytes_of(const Shard& shard, int64_t Chunk::* which) {
  int64_t sum = 0;
  for (const Chunk& chunk : shard.chunks) sum += chunk.*which;
  return sum;
}

}  // namespace

Carried::Carried(const cgx_collective_t& call, int rank, int size, BuffersUsed used)
    : plan_(carried_plan(call, rank, size, used)), layout_(plan_) {}

int64_t Carried::scatter_bytes(int owner) const {
  if (plan_.size == 1 || one_shot()) return 0;
  return bytes_of(layout_.shard(owner), &Chunk::scatter_bytes);
}

int64_t Carried::gather_bytes(int owner) const {
  if (plan_.size == 1) return 0;
  return bytes_of(layout_.shard(owner), one_shot() ? &Chunk::scatter_bytes : &Chunk::gather_bytes);
}

void Carried::encode(std::byte* messages) const {
  if (plan_.size == 1) return;
  const auto encode_shard = [&](int owner) {
    const Shard& shard = layout_.shard(owner);
    check_pointer(messages, bytes_of(shard, &Chunk::scatter_bytes), "messages", "bytes");
    for (const Chunk& chunk : shard.chunks) {
      encode_chunk(plan_, shard, chunk, Way::kScatter, plan_.input, messages);
      messages += chunk.scatter_bytes;
    }
  };
  if (one_shot()) return encode_shard(plan_.rank);
  for (int owner = 0; owner < plan_.size; ++owner)
    if (owner != plan_.rank) encode_shard(owner);
}

void Carried::reduce(const std::byte* arrived, std::byte* message) const {
  require(!one_shot(), CGX_INVALID_ARGUMENT,
          "the algorithm is one_shot, whose values are summed by cgx_carried_decode: "
          "cgx_carried_reduce is sra's");
  if (plan_.size == 1) return;
  const int64_t bytes = scatter_bytes(plan_.rank);
  check_pointer(arrived, bytes, "arrived", "bytes");
  check_pointer(message, gather_bytes(plan_.rank), "message", "bytes");
  std::vector<const std::byte*> messages(plan_.size);
  for (int rank = 0; rank < plan_.size; ++rank)
    if (rank != plan_.rank) messages[rank] = arrived + (rank - (rank > plan_.rank)) * bytes;
  ChunkReducer reducer(plan_);
  const Shard& shard = layout_.shard(plan_.rank);
  for (const Chunk& chunk : shard.chunks) {
    reducer.to_gather_message(shard, chunk, messages, plan_.input, message, nullptr);
    message += chunk.gather_bytes;
    for (int rank = 0; rank < plan_.size; ++rank)
      if (rank != plan_.rank) messages[rank] += chunk.scatter_bytes;
  }
}

void Carried::decode(const std::byte* gathered, int64_t stride) const {
  if (plan_.size == 1) return pass_through(plan_);
  int64_t longest = 0;
  for (int rank = 0; rank < plan_.size; ++rank) longest = std::max(longest, gather_bytes(rank));
  check_pointer(gathered, longest, "gathered", "bytes");
  check_stride(stride, longest, plan_.size);
  if (!one_shot()) {
    for (int owner = 0; owner < plan_.size; ++owner) {
      const Shard& shard = layout_.shard(owner);
      const std::byte* message = gathered + owner * stride;
      for (const Chunk& chunk : shard.chunks) {
        decode_chunk(plan_, shard, chunk, message, plan_.output);
        message += chunk.gather_bytes;
      }
    }
    return;
  }
  std::vector<const std::byte*> messages(plan_.size);
  for (int rank = 0; rank < plan_.size; ++rank) messages[rank] = gathered + rank * stride;
  ChunkReducer reducer(plan_);
  const Shard& shard = layout_.shard(plan_.rank);
  for (const Chunk& chunk : shard.chunks) {
    reducer.to_values(shard, chunk, messages, nullptr, plan_.output);
    for (const std::byte*& message : messages) message += chunk.scatter_bytes;
  }
}

}  // namespace cgx
