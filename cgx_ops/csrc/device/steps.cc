#include "device/steps.h"

#include <algorithm>
#include <span>
#include <tuple>
#include <utility>

#include "base/status.h"

namespace cgx::device {
namespace {

using CpuPiece = ::cgx::Piece;

// Collects pieces and enqueues them, one full launch at a time.
template <typename Launch>
class Batch {
 public:
  using Put = void (Queue::*)(const Launch&);
  Batch(Queue& queue, Put put, const Launch& launch) : queue_(queue), put_(put), launch_(launch) {
    launch_.pieces.count = 0;
  }
  void add(const Piece& piece) {
    if (launch_.pieces.count == kMostPieces) flush();
    launch_.pieces.at[launch_.pieces.count++] = piece;
  }
  void flush() {
    if (launch_.pieces.count > 0) (queue_.*put_)(launch_);
    launch_.pieces.count = 0;
  }

 private:
  Queue& queue_;
  const Put put_;
  Launch launch_;
};

// The coding of a run of a piece in a stage (compressor/codec.h), and its offset in the chunk's
// message.
struct Coded {
  int64_t at;
  Coding coding;
};

class Runs {
 public:
  Runs(const CpuPiece& piece, Stage stage)
      : at_(piece.coded[stage].at),
        runs_(device_runs(piece.segment->codecs[stage], piece.numel)),
        codec_(*piece.coded[stage].codec->fixed_length()) {}
  size_t size() const { return runs_.size(); }
  const DeviceRun& operator[](size_t i) const { return runs_[i]; }
  // The coding of the part of a run that begins at element `first`.
  Coded coded(int64_t first) const {
    size_t i = runs_.size() - 1;
    while (runs_[i].first > first) --i;
    return {at_ + codec_.offset(first), runs_[i].coding};
  }

 private:
  const int64_t at_;
  const DeviceRuns runs_;  // throws unless GPUs support the codec
  const FixedLengthCodec& codec_;
};

// Calls add(piece, first) for each run of a CPU piece, which begins at its element `first`. In the
// gather stage, uncompressed values may be one run where the scatter stage has two, but not vice
// versa.
template <typename Add>
void for_runs(const Plan& plan, const CpuPiece& cpu, const Runs& runs, const Add& add) {
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto& [first, numel, coding] = runs[i];
    Piece piece{};
    if (cpu.residual) piece.residual = cpu.residual + plan.bytes(first);
    piece.numel = numel;
    piece.first_index = cpu.first_index + first;
    piece.bucket_size = cpu.segment->codecs[Stage::kScatter].bucket_size;
    piece.seed = cpu.seed;
    piece.seed_at = cpu.segment->seed_at;
    piece.seed_number = static_cast<int32_t>(cpu.segment->seed_number);
    add(piece, first);
  }
}

std::span<const CpuPiece> pieces_of(const Shard& shard, const Round& round) {
  const Chunk* chunk = Steps::chunk(shard, round.number);
  return chunk ? shard.pieces_of(*chunk) : std::span<const CpuPiece>();
}

// A launch's addresses are not const, because some launches write to them.
std::byte* at(const Received& messages, int rank) {
  return const_cast<std::byte*>(messages.from) + rank * messages.stride;
}

// The distinct addresses: the first, and the distances of the others from it.
std::pair<std::byte*, Copies> distinct(std::span<std::byte* const> given) {
  std::vector<std::byte*> addresses(given.begin(), given.end());
  std::sort(addresses.begin(), addresses.end());
  addresses.erase(std::unique(addresses.begin(), addresses.end()), addresses.end());
  require(addresses.size() <= kMostPeers, CGX_INTERNAL, addresses.size(),
          " addresses of one message");
  Copies copies{};
  for (size_t i = 1; i < addresses.size(); ++i)
    copies.distance[copies.count++] = addresses[i] - addresses[0];
  return {addresses[0], copies};
}

}  // namespace

Steps::Steps(const Plan& plan, const Layout& layout) : plan_(plan), layout_(layout) {
  if (!plan_.segments.empty()) rounding_ = plan_.segments[0].rounding;
  for (const Segment& segment : plan_.segments) {
    for (const CodecSettings& codec : segment.codecs.each) device_runs(codec, 0);  // throws
    require(
        segment.rounding == rounding_, CGX_UNSUPPORTED,
        "segments use different roundings: on GPUs all segments of a call must use the same one");
  }
}

const Chunk* Steps::chunk(const Shard& shard, int64_t round) {
  return round < static_cast<int64_t>(shard.chunks.size()) ? &shard.chunks[round] : nullptr;
}

void Steps::encode(const Round& round, std::span<std::byte* const> to) const {
  const bool for_all = one_shot() || !scatters();
  const Stage stage = scatters() ? Stage::kScatter : Stage::kGather;
  Encode launch{};
  launch.dtype = plan_.dtype;
  launch.rounding = rounding_;
  launch.rank = static_cast<uint32_t>(plan_.noise_rank);
  launch.phase = static_cast<uint32_t>(stage);
  launch.regions = round.regions;
  launch.fault = round.fault;
  std::byte* message_for_all = nullptr;
  if (for_all) std::tie(message_for_all, launch.copies) = distinct(to);
  Batch<Encode> batch(round.queue, &Queue::encode, launch);
  const auto encode_shard = [&](int owner, std::byte* message) {
    for (const CpuPiece& cpu : pieces_of(layout_.shard(owner), round)) {
      const Runs runs(cpu, stage);
      for_runs(plan_, cpu, runs, [&](Piece piece, int64_t first) {
        const Coded coded = runs.coded(first);
        piece.values = plan_.input + cpu.input_at + plan_.bytes(first);
        piece.message = message + coded.at;
        piece.coding = coded.coding;
        piece.block = gathers() ? 0 : owner;
        batch.add(piece);
      });
    }
  };
  if (for_all) {
    encode_shard(plan_.rank, message_for_all);
  } else {
    for (int owner = 0; owner < plan_.size; ++owner)
      if (owner != plan_.rank) encode_shard(owner, to[owner]);
  }
  batch.flush();
}

void Steps::reduce(const Round& round, const Received& messages,
                   std::span<std::byte* const> to) const {
  const bool to_message = !to.empty(), averages = plan_.op == Op::kAvg;
  Reduce launch{};
  launch.dtype = plan_.dtype;
  launch.rounding = rounding_;
  launch.op = plan_.op;
  launch.divisor = static_cast<float>(plan_.divisor);
  launch.rank = static_cast<uint32_t>(plan_.noise_rank);
  launch.phase = static_cast<uint32_t>(Stage::kGather);
  launch.size = plan_.size;
  launch.own = one_shot() ? -1 : plan_.rank;
  launch.stride = messages.stride;
  launch.residual_scale = averages ? launch.divisor : 1.0f;
  launch.regions = round.regions;
  launch.fault = round.fault;
  std::byte* message = nullptr;
  if (to_message) std::tie(message, launch.copies) = distinct(to);
  Batch<Reduce> batch(round.queue, &Queue::reduce, launch);
  for (const CpuPiece& cpu : pieces_of(layout_.shard(plan_.rank), round)) {
    const Runs scattered(cpu, Stage::kScatter), gathered(cpu, Stage::kGather);
    for_runs(plan_, cpu, scattered, [&](Piece piece, int64_t first) {
      if (!one_shot()) piece.values = plan_.input + cpu.input_at + plan_.bytes(first);
      const Coded coded = scattered.coded(first), reduced = gathered.coded(first);
      piece.message = at(messages, 0) + coded.at;
      piece.coding = coded.coding;
      piece.reduced_coding = reduced.coding;
      if (to_message) {
        piece.reduced = message + reduced.at;
      } else {
        piece.result = plan_.output + cpu.output_at + plan_.bytes(first);
        if (one_shot()) piece.residual = nullptr;  // it is that of my message
      }
      batch.add(piece);
    });
  }
  batch.flush();
  if (to_message || one_shot()) return;
  // My own values were not quantized.
  for (const CpuPiece& cpu : pieces_of(layout_.shard(plan_.rank), round))
    if (cpu.residual) round.queue.clear(cpu.residual, plan_.bytes(cpu.numel));
}

void Steps::decode(const Round& round, const Received& messages) const {
  Decode launch{};
  launch.dtype = plan_.dtype;
  launch.regions = round.regions;
  launch.fault = round.fault;
  Batch<Decode> batch(round.queue, &Queue::decode, launch);
  const bool exchanges = plan_.verb->exchanges();
  const Stage stage = exchanges ? Stage::kScatter : Stage::kGather;
  for (int owner = 0; owner < plan_.size; ++owner) {
    const Shard& shard = exchanges ? layout_.received(owner) : layout_.shard(owner);
    for (const CpuPiece& cpu : pieces_of(shard, round)) {
      const Runs runs(cpu, stage);
      for_runs(plan_, cpu, runs, [&](Piece piece, int64_t first) {
        const Coded coded = runs.coded(first);
        piece.message = at(messages, owner) + coded.at;
        piece.coding = coded.coding;
        piece.result = plan_.output + cpu.output_at + plan_.bytes(first);
        piece.residual = nullptr;  // already written
        batch.add(piece);
      });
    }
  }
  batch.flush();
}

void copy_own_block(const Plan& plan, Queue& queue) {
  const auto& from = plan.sends[plan.rank];
  const auto& to = plan.receives[plan.rank];
  for (size_t i = 0; i < from.size(); ++i)
    if (from[i].numel > 0)
      queue.copy(plan.output + to[i].output_at, plan.input + from[i].input_at,
                 plan.bytes(from[i].numel));
}

void pass_through(const Plan& plan, Queue& queue) {
  if (plan.verb->exchanges()) return copy_own_block(plan, queue);
  Reduce launch{};  // the sum of one rank's values and residual, divided
  launch.dtype = plan.dtype;
  launch.op = plan.op;
  launch.divisor = static_cast<float>(plan.divisor);
  launch.size = 1;
  launch.own = 0;
  Batch<Reduce> batch(queue, &Queue::reduce, launch);
  for (const Segment& segment : plan.segments) {
    const size_t bytes = plan.bytes(segment.numel);
    if (bytes == 0) continue;
    const std::byte* from = plan.input + segment.input_at;
    std::byte* to = plan.output + segment.output_at;
    const CodecSettings& codec = segment.codecs[Stage::kGather];
    if (votes(codec) || plan.divides_alone() || segment.residual) {
      Piece piece{};
      piece.values = from;
      piece.result = to;
      piece.residual = segment.residual;
      piece.numel = segment.numel;
      piece.bucket_size = codec.bucket_size;
      if (votes(codec))
        piece.coding = piece.reduced_coding = device_runs(codec, segment.numel)[0].coding;
      batch.add(piece);
    } else if (from != to) {
      queue.copy(to, from, bytes);
    }
  }
  batch.flush();
  for (const Segment& segment : plan.segments)
    if (segment.residual && segment.numel > 0)
      queue.clear(segment.residual, plan.bytes(segment.numel));
}

}  // namespace cgx::device
