#include "algorithm/carried.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "algorithm/algorithm.h"
#include "algorithm/chunks.h"
#include "base/checks.h"

namespace cgx {
namespace {

Plan carried_plan(const cgx_collective_t& call, int rank, int size, BuffersUsed used) {
  require(size >= 1 && rank >= 0 && rank < size, CGX_INVALID_ARGUMENT, "rank is ", rank,
          " and size ", size, "; accepted: 0 <= rank < size");
  require(call.device == CGX_CPU, CGX_UNSUPPORTED, "device is ", call.device,
          ": messages that the caller sends are encoded on the CPU; give CGX_CPU, and values in "
          "host memory");
  Plan plan = make_plan(call, rank, size, used);
  require(plan.verb->id == CGX_ALLREDUCE, CGX_INVALID_ARGUMENT, "verb is ", call.verb,
          ": only the messages of an allreduce can be sent by the caller; give CGX_ALLREDUCE");
  require(plan.algorithm != CGX_RING && plan.algorithm != CGX_HIERARCHICAL, CGX_INVALID_ARGUMENT,
          "algorithm is ", plan.algorithm == CGX_RING ? "ring" : "hierarchical",
          ", which forwards messages and is not supported here; give auto, one_shot or sra");
  resolve_algorithm(&plan);
  return plan;
}

// All message sizes must be known in advance. So a codec that cannot encode in parts reserves its
// largest size, and stores the actual length in front.
constexpr int64_t kLengthBytes = 8;

int64_t room_of(const Chunk& chunk, Stage stage) {
  return chunk.length[stage].most + (chunk.sliced ? 0 : kLengthBytes);
}

int64_t bytes_of(const Shard& shard, Stage stage) {
  int64_t sum = 0;
  for (const Chunk& chunk : shard.chunks) sum += room_of(chunk, stage);
  return sum;
}

// Throws unless a buffer has the expected size.
void check_length(int64_t given, int64_t wanted, const char* what) {
  require(given == wanted, CGX_INVALID_ARGUMENT, what, " has ", given,
          " bytes; cgx_carried_plan reports ", wanted, " for these values and ranks");
}

// Zeroes a buffer that is sent to peers, so that it does not leak earlier contents of the memory.
std::byte* cleared(std::span<std::byte> buffer, int64_t least, const char* what) {
  const auto bytes = static_cast<int64_t>(buffer.size());
  require(bytes >= least, CGX_INVALID_ARGUMENT, what, " has room for ", bytes, " bytes; ", least,
          " are needed, as cgx_carried_plan reports");
  check_pointer(buffer.data(), least, what, "bytes");
  if (bytes > 0) std::memset(buffer.data(), 0, bytes);
  return buffer.data();
}

// The message of `source` at `bytes`.
Encoded message_at(const Chunk& chunk, Stage stage, int source, const std::byte* bytes) {
  const int64_t most = chunk.length[stage].most;
  if (chunk.sliced) return {source, {bytes, static_cast<size_t>(most)}};
  int64_t length;
  std::memcpy(&length, bytes, kLengthBytes);
  require(length >= 0 && length <= most, CGX_PEER_FAILED, "rank ", source,
          " sent a malformed message: its length is ", length, ", but at most ", most,
          " are expected");
  return {source, {bytes + kLengthBytes, static_cast<size_t>(length)}};
}

}  // namespace

Carried::Carried(const cgx_collective_t& call, int rank, int size, BuffersUsed used)
    : plan_(carried_plan(call, rank, size, used)), seeds_(shared_seeds(plan_)), layout_(plan_) {}

int64_t Carried::encoded_bytes(int owner) const {
  return seeds_bytes() + bytes_of(layout_.shard(owner), Stage::kScatter);
}

void Carried::check_seeds(int source, const std::byte* message) const {
  if (!seeds_) return;
  uint64_t theirs;
  std::memcpy(&theirs, message, sizeof(theirs));
  require(theirs == *seeds_, CGX_MISMATCH, "ranks ", plan_.rank, " and ", source,
          " disagree: the seed of the random indices ", *seeds_, " against ", theirs,
          "; every rank must pass the same seed or key");
}

int64_t Carried::scatter_bytes(int owner) const {
  return plan_.size == 1 || one_shot() ? 0 : encoded_bytes(owner);
}

int64_t Carried::gather_bytes(int owner) const {
  if (plan_.size == 1) return 0;
  return one_shot() ? encoded_bytes(owner) : bytes_of(layout_.shard(owner), Stage::kGather);
}

void Carried::encode(std::span<std::byte> room) const {
  if (plan_.size == 1) return;
  std::vector<int> owners;  // of the shards to send
  for (int rank = 0; rank < plan_.size; ++rank)
    if ((rank == plan_.rank) == one_shot()) owners.push_back(rank);
  int64_t bytes = 0;
  for (const int owner : owners) bytes += encoded_bytes(owner);
  std::byte* messages = cleared(room, bytes, "messages");
  for (const int owner : owners) {
    const Shard& shard = layout_.shard(owner);
    if (seeds_) std::memcpy(messages, &*seeds_, sizeof(*seeds_));
    messages += seeds_bytes();
    for (const Chunk& chunk : shard.chunks) {
      std::byte* to = messages + (chunk.sliced ? 0 : kLengthBytes);
      const int64_t bytes = encode_chunk(plan_, shard, chunk, Stage::kScatter, plan_.input, to);
      if (!chunk.sliced) std::memcpy(messages, &bytes, kLengthBytes);
      messages += room_of(chunk, Stage::kScatter);
    }
  }
}

void Carried::reduce(std::span<const std::byte> received, std::span<std::byte> room) const {
  require(!one_shot(), CGX_INVALID_ARGUMENT,
          "the algorithm is one_shot, which has no reduce step: cgx_carried_decode sums. Call "
          "cgx_carried_reduce for sra only");
  if (plan_.size == 1) return;
  const int64_t bytes = scatter_bytes(plan_.rank);
  check_length(received.size(), (plan_.size - 1) * bytes, "arrived");
  check_pointer(received.data(), bytes, "arrived", "bytes");
  const std::byte* arrived = received.data();
  std::byte* message = cleared(room, gather_bytes(plan_.rank), "message");
  const auto from = [&](int rank) { return arrived + (rank - (rank > plan_.rank)) * bytes; };
  for (int rank = 0; rank < plan_.size; ++rank)
    if (rank != plan_.rank) check_seeds(rank, from(rank));
  arrived += seeds_bytes();
  std::vector<Encoded> messages(plan_.size, kOwnValues);
  ChunkReducer reducer(plan_);
  const Shard& shard = layout_.shard(plan_.rank);
  for (const Chunk& chunk : shard.chunks) {
    for (int rank = 0; rank < plan_.size; ++rank)
      if (rank != plan_.rank) messages[rank] = message_at(chunk, Stage::kScatter, rank, from(rank));
    message += reducer.to_message(Stage::kGather, shard, chunk, messages, plan_.input, message);
    arrived += room_of(chunk, Stage::kScatter);
  }
}

void Carried::decode(std::span<const std::byte> received) const {
  if (plan_.size == 1) return pass_through(plan_);
  int64_t longest = 0;
  for (int rank = 0; rank < plan_.size; ++rank) longest = std::max(longest, gather_bytes(rank));
  const auto bytes = static_cast<int64_t>(received.size()), stride = bytes / plan_.size;
  require(stride >= longest && bytes % plan_.size == 0, CGX_INVALID_ARGUMENT, "gathered has ",
          bytes, " bytes; it must be ", plan_.size, " messages of equal size, at least ", longest,
          " bytes each, as cgx_carried_plan reports");
  check_pointer(received.data(), longest, "gathered", "bytes");
  const std::byte* gathered = received.data();
  if (!one_shot()) {
    for (int owner = 0; owner < plan_.size; ++owner) {
      const Shard& shard = layout_.shard(owner);
      const std::byte* message = gathered + owner * stride;
      for (const Chunk& chunk : shard.chunks) {
        decode_chunk(plan_, shard, chunk, message_at(chunk, Stage::kGather, owner, message),
                     plan_.output);
        message += room_of(chunk, Stage::kGather);
      }
    }
    return;
  }
  for (int rank = 0; rank < plan_.size; ++rank) check_seeds(rank, gathered + rank * stride);
  gathered += seeds_bytes();
  std::vector<Encoded> messages(plan_.size);
  ChunkReducer reducer(plan_);
  const Shard& shard = layout_.shard(plan_.rank);
  for (const Chunk& chunk : shard.chunks) {
    for (int rank = 0; rank < plan_.size; ++rank)
      messages[rank] = message_at(chunk, Stage::kScatter, rank, gathered + rank * stride);
    reducer.to_values(shard, chunk, messages, nullptr, plan_.output);
    gathered += room_of(chunk, Stage::kScatter);
  }
}

}  // namespace cgx
