#include "algorithm/carried.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "algorithm/algorithm.h"
#include "algorithm/chunks.h"
#include "algorithm/packing.h"
#include "base/checks.h"

namespace cgx {
namespace {

// Longer than any message. Sizes in bits do not overflow.
constexpr int64_t kUncut = int64_t{1} << 50;

Plan carried_plan(const cgx_collective_t& call, int rank, int size, BuffersUsed used) {
  require(size >= 1 && rank >= 0 && rank < size, CGX_INVALID_ARGUMENT, "rank is ", rank,
          " and size ", size, "; accepted: 0 <= rank < size");
  in_range("device", call.device, CGX_CPU, CGX_CUDA, "a cgx_device_t");
  Plan plan = make_plan(call, rank, size, used);
  require(plan.verb->id == CGX_ALLREDUCE, CGX_INVALID_ARGUMENT, "verb is ", call.verb,
          ": only the messages of an allreduce can be sent by the caller; give CGX_ALLREDUCE");
  require(plan.algorithm != CGX_RING && plan.algorithm != CGX_HIERARCHICAL, CGX_INVALID_ARGUMENT,
          "algorithm is ", plan.algorithm == CGX_RING ? "ring" : "hierarchical",
          ", which forwards messages and is not supported here; give auto, one_shot or sra");
  resolve_algorithm(&plan);
  if (call.device == CGX_CUDA) plan.chunk_bytes = kUncut;  // a launch takes a whole message
  return plan;
}

// All message sizes must be known in advance. So a codec without a fixed length reserves its
// largest size, and stores the actual length in front.
constexpr int64_t kLengthBytes = 8;

int64_t room_of(const Chunk& chunk, Stage stage) {
  return chunk.length[stage].most + (chunk.fixed_length ? 0 : kLengthBytes);
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

// Throws unless a buffer for messages has enough room.
void check_room(std::span<const std::byte> buffer, int64_t least, const char* what) {
  const auto bytes = static_cast<int64_t>(buffer.size());
  require(bytes >= least, CGX_INVALID_ARGUMENT, what, " has room for ", bytes, " bytes; ", least,
          " are needed, as cgx_carried_plan reports");
  check_pointer(buffer.data(), least, what, "bytes");
}

// Zeroes a buffer that is sent to peers, so that it does not leak earlier contents of the memory.
std::byte* cleared(std::span<std::byte> buffer) {
  if (!buffer.empty()) std::memset(buffer.data(), 0, buffer.size());
  return buffer.data();
}

// The message of `source` at `bytes`.
Encoded message_at(const Chunk& chunk, Stage stage, int source, const std::byte* bytes) {
  const int64_t most = chunk.length[stage].most;
  if (chunk.fixed_length) return {source, {bytes, static_cast<size_t>(most)}};
  int64_t length;
  std::memcpy(&length, bytes, kLengthBytes);
  require(length >= 0 && length <= most, CGX_PEER_FAILED, "rank ", source,
          " sent a malformed message: its length is ", length, ", but at most ", most,
          " are expected");
  return {source, {bytes + kLengthBytes, static_cast<size_t>(length)}};
}

// Writes a message to `*at` by encode(), which returns its length, and advances `*at`.
template <typename Encode>
void write_message(const Chunk& chunk, Stage stage, std::byte** at, const Encode& encode) {
  const int64_t bytes = encode(*at + (chunk.fixed_length ? 0 : kLengthBytes));
  if (!chunk.fixed_length) std::memcpy(*at, &bytes, kLengthBytes);
  *at += room_of(chunk, stage);
}

}  // namespace

Carried::Carried(const cgx_collective_t& call, int rank, int size, BuffersUsed used)
    : on_device_(call.device == CGX_CUDA),
      plan_(carried_plan(call, rank, size, used)),
      seeds_(shared_seeds(plan_)),
      layout_(plan_) {}

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

std::vector<int64_t> Carried::encoded_at() const {
  std::vector<int64_t> at(plan_.size + 1, 0);
  for (int rank = 0; rank < plan_.size; ++rank)
    at[rank + 1] = at[rank] + (has_room(rank) ? scatter_bytes(rank) : 0);
  if (one_shot()) at.back() = gather_bytes(plan_.rank);
  return at;
}

std::vector<int64_t> Carried::arrived_at() const {
  const int64_t bytes = scatter_bytes(plan_.rank);
  std::vector<int64_t> at(plan_.size + 1, 0);
  for (int rank = 0; rank < plan_.size; ++rank)
    at[rank + 1] = at[rank] + (has_room(rank) ? bytes : 0);
  return at;
}

void Carried::check_encode(std::span<const std::byte> messages) const {
  check_room(messages, encoded_at().back(), "messages");
}

void Carried::check_reduce(std::span<const std::byte> arrived,
                           std::span<const std::byte> message) const {
  require(!one_shot(), CGX_INVALID_ARGUMENT,
          "the algorithm is one_shot, which has no reduce step: cgx_carried_decode sums. Call "
          "cgx_carried_reduce for sra only");
  check_length(arrived.size(), arrived_at().back(), "arrived");
  check_pointer(arrived.data(), scatter_bytes(plan_.rank), "arrived", "bytes");
  check_room(message, gather_bytes(plan_.rank), "message");
}

int64_t Carried::check_decode(std::span<const std::byte> gathered) const {
  int64_t longest = 0;
  for (int rank = 0; rank < plan_.size; ++rank) longest = std::max(longest, gather_bytes(rank));
  const auto bytes = static_cast<int64_t>(gathered.size()), stride = bytes / plan_.size;
  require(stride >= longest && bytes % plan_.size == 0, CGX_INVALID_ARGUMENT, "gathered has ",
          bytes, " bytes; it must be ", plan_.size, " messages of equal size, at least ", longest,
          " bytes each, as cgx_carried_plan reports");
  check_pointer(gathered.data(), longest, "gathered", "bytes");
  return stride;
}

void Carried::encode(std::span<std::byte> room) const {
  if (plan_.size == 1) return;
  check_encode(room);
  if (plan_.packing) plan_.packing->load(plan_);
  std::byte* const messages = cleared(room);
  const std::vector<int64_t> at = encoded_at();
  for (int owner = 0; owner < plan_.size; ++owner) {
    if ((owner == plan_.rank) != one_shot()) continue;
    const Shard& shard = layout_.shard(owner);
    std::byte* message = messages + at[owner];
    if (seeds_) std::memcpy(message, &*seeds_, sizeof(*seeds_));
    message += seeds_bytes();
    for (const Chunk& chunk : shard.chunks)
      write_message(chunk, Stage::kScatter, &message, [&](std::byte* to) {
        return encode_chunk(plan_, shard, chunk, Stage::kScatter, plan_.input, to);
      });
  }
  if (plan_.packing) plan_.packing->store_residuals(plan_);
}

void Carried::reduce(std::span<const std::byte> arrived, std::span<std::byte> room) const {
  if (plan_.size > 1 || one_shot()) check_reduce(arrived, room);
  if (plan_.size == 1) return;
  if (plan_.packing) plan_.packing->load(plan_);
  std::byte* message = cleared(room);
  const auto from = [&, at = arrived_at()](int rank) { return arrived.data() + at[rank]; };
  for (int rank = 0; rank < plan_.size; ++rank)
    if (rank != plan_.rank) check_seeds(rank, from(rank));
  int64_t at = seeds_bytes();
  std::vector<Encoded> messages(plan_.size, kOwnValues);
  ChunkReducer reducer(plan_);
  const Shard& shard = layout_.shard(plan_.rank);
  for (const Chunk& chunk : shard.chunks) {
    for (int rank = 0; rank < plan_.size; ++rank)
      if (rank != plan_.rank)
        messages[rank] = message_at(chunk, Stage::kScatter, rank, from(rank) + at);
    write_message(chunk, Stage::kGather, &message, [&](std::byte* to) {
      return reducer.to_message(Stage::kGather, shard, chunk, messages, plan_.input, to);
    });
    at += room_of(chunk, Stage::kScatter);
  }
  if (plan_.packing) plan_.packing->store_residuals(plan_);
}

void Carried::decode(std::span<const std::byte> received) const {
  if (plan_.size == 1) return pass_through(plan_);
  decode_values(received);
  if (plan_.packing) plan_.packing->store_results(plan_);
}

void Carried::decode_values(std::span<const std::byte> received) const {
  const int64_t stride = check_decode(received);
  const std::byte* gathered = received.data();
  if (!one_shot()) {
    for (int owner = 0; owner < plan_.size; ++owner) {
      const Shard& shard = layout_.shard(owner);
      const std::byte* message = gathered + owner * stride;
      for (const Chunk& chunk : shard.chunks) {
        decode_chunk(plan_, shard, chunk, Stage::kGather,
                     message_at(chunk, Stage::kGather, owner, message), plan_.output);
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
