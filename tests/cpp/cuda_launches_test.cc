// Runs the code around the GPU kernels on the host: how buckets are distributed over thread groups,
// and Signals between ranks that are threads. Exits with 1 if any check failed.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "checks.h"
#include "host_group.h"
#include "kernel/cuda/assign.h"
#include "kernel/cuda/exchange.h"
#include "kernel/cuda/memory.h"
#include "kernel/cuda/work.h"

namespace cgx::device::cuda {
namespace {

// ---- 1. assignment of pieces, and distribution of buckets ----

// A launch of one piece after the other, as for_kernels() assigns them.
struct Assigned {
  Kernel kernel;
  std::vector<Piece> pieces;
};
template <typename Launch>
std::vector<Assigned> assigned(const Launch& launch) {
  std::vector<Assigned> all;
  for_kernels(launch, [&](const Launch& part, const Kernel& kernel) {
    all.push_back({kernel, {part.pieces.at, part.pieces.at + part.pieces.count}});
  });
  return all;
}

// Addresses that are not used.
std::byte* address(uintptr_t number) { return reinterpret_cast<std::byte*>(number); }

void test_assignment() {
  constexpr Coding kFour{.bits = 4}, kThree{.bits = 3};
  Encode launch{};
  launch.pieces = {5,
                   {// Two launches: whole buckets, and the rest.
                    {.values = address(1 << 20),
                     .residual = address(1 << 24),
                     .message = address(1 << 28),
                     .numel = 200 * 512 + 7,
                     .first_index = 512,
                     .bucket_size = 512,
                     .coding = kFour},
                    {.values = address(16), .numel = 0, .bucket_size = 512, .coding = kFour},
                    // Too short for two launches.
                    {.values = address(16), .numel = 513, .bucket_size = 512, .coding = kFour},
                    {.values = address(4), .numel = 512, .bucket_size = 512, .coding = kFour},
                    {.values = address(16), .numel = 512, .bucket_size = 512, .coding = kThree}}};
  const auto parts = assigned(launch);
  CHECK(parts.size() == 2, "an aligned and a general kernel");
  const aligned::Variant variant{.bits = 4, .default_size = true, .residual = true};
  CHECK(parts[0].kernel.aligned == variant && parts[0].pieces.size() == 1, "aligned");
  CHECK(parts[0].pieces[0].numel == 200 * 512, "whole buckets");
  CHECK(!parts[1].kernel.aligned && parts[1].pieces.size() == 4, "general");
  const Piece& rest = parts[1].pieces[0];
  CHECK(rest.numel == 7 && rest.first_index == 201 * 512, "the rest");
  CHECK(rest.values == address((1 << 20) + 200 * 512 * 4), "values of the rest");
  CHECK(rest.residual == address((1 << 24) + 200 * 512 * 4), "residual of the rest");
  CHECK(rest.message == address((1 << 28) + 200 * 264), "message of the rest");

  // Other pieces for the general kernels: unaligned, or of another kind.
  const auto is_aligned = [](const auto& one) {
    return assigned(one)[0].kernel.aligned.has_value();
  };
  launch.pieces = {1, {{.values = address(16), .numel = 512, .bucket_size = 512, .coding = kFour}}};
  CHECK(is_aligned(launch), "one bucket");
  for (const int64_t size : {1, 64, 100, 384, 2048}) {
    Encode other = launch;
    other.pieces.at[0].bucket_size = other.pieces.at[0].numel = size;
    CHECK(!is_aligned(other), join("bucket size ", size));
  }
  Encode copies = launch, regions = launch, shift = launch;
  copies.copies = {2, {8, 12}};
  regions.regions.bytes = 4;
  shift.rounding = RoundingMode::kShift;
  CHECK(!is_aligned(copies) && !is_aligned(regions) && !is_aligned(shift), "an Encode");
  Encode longest = launch, too_long = launch;
  longest.pieces.at[0].numel = aligned::kMostNumel - 512;
  too_long.pieces.at[0].numel = aligned::kMostNumel;
  CHECK(is_aligned(longest) && !is_aligned(too_long), "lanes of a piece have 32 bits");
  const Reduce sum{.size = 2,
                   .stride = 264,
                   .pieces = {1,
                              {{.result = address(16),
                                .message = address(8),
                                .numel = 512,
                                .bucket_size = 512,
                                .coding = kFour}}}};
  CHECK(is_aligned(sum), "a sum");
  Reduce stride = sum, op = sum, both = sum, votes = sum;
  stride.stride = 260;
  op.op = Op::kMax;
  both.pieces.at[0].reduced = address(8);
  votes.pieces.at[0].reduced_coding = {.format = BucketFormat::kSign, .bits = 1};
  CHECK(!is_aligned(stride) && !is_aligned(op) && !is_aligned(both) && !is_aligned(votes),
        "a Reduce");
}

void test_work() {
  constexpr int64_t kHuge = (int64_t{1} << 33) + 5;  // more than 2^32 elements
  constexpr Coding kThree{.bits = 3}, kEight{.bits = 8}, kFour{.bits = 4};
  Decode launch{};
  launch.pieces.count = 6;
  const auto set = [&](int i, int64_t numel, int64_t bucket_size, const Coding& coding) {
    launch.pieces.at[i] = {
        .numel = numel, .bucket_size = bucket_size, .coding = coding, .reduced_coding = coding};
  };
  set(0, kHuge, 512, kThree);
  set(1, 0, 512, kThree);
  set(2, kHuge, 1 << 20, kThree);
  set(3, 100, int64_t{1} << 40, kThree);  // shorter than its bucket
  set(4, 5000, 1, {});
  launch.pieces.at[4].message = address(4);
  set(5, 1025, 1025, kEight);
  const auto parts = assigned(launch);
  CHECK(parts.size() == 2, "warps and blocks");
  Pieces warps{}, blocks{};
  for (const Assigned& part : parts) {
    Pieces& pieces = part.kernel.takers == Takers::kWarps ? warps : blocks;
    for (const Piece& piece : part.pieces) pieces.at[pieces.count++] = piece;
  }
  CHECK(warps.at[2].bucket_size == kMostOfWarp, "bucket size of exact values");
  const Work work = work_of(warps, buckets_of);
  const int64_t first = kHuge / 512 + 1;
  CHECK(warps.count == 3 && work.items == first + 1 + 5, "work of warps");
  CHECK(blocks.count == 2 && work_of(blocks, buckets_of).items == kHuge / (1 << 20) + 1 + 1,
        "work of blocks");

  // Consecutive searches and a search from the start find each bucket.
  struct Expected {
    int64_t bucket;
    int32_t piece;
    int64_t number;
  };
  int32_t from = 0;
  for (const auto& [bucket, piece, number] :
       {Expected{0, 0, 0}, Expected{first - 1, 0, first - 1}, Expected{first, 1, 0},
        Expected{first + 1, 2, 0}, Expected{first + 5, 2, 4}}) {
    int32_t start = 0;
    for (int32_t* at : {&from, &start}) {
      const Item found = find_item(warps, work, bucket, at);
      CHECK(found.piece == piece && found.number == number, join("bucket ", bucket));
    }
  }
  CHECK(bucket_at(first - 1, 512, kFour, 4) == (first - 1) * 264, "an offset of more than 2^32");
  CHECK(bucket_at(0, int64_t{1} << 62, kEight, 4) == 0, "a bucket longer than memory");
  CHECK(field_bytes((int64_t{1} << 62) + 1, kEight) == (int64_t{1} << 62) + 1, "overflow");
  CHECK(buckets_of({.numel = 1, .bucket_size = std::numeric_limits<int64_t>::max()}) == 1, "one");

  CHECK(groups_for(Takers::kWarps, 9, 132) == 9, "one bucket for each group");
  CHECK(groups_for(Takers::kWarps, int64_t{1} << 40, 132) == 132 * 64,
        "groups take several buckets");
  CHECK(groups_for(Takers::kBlocks, int64_t{1} << 40, 132) == 132 * 4,
        "groups take several buckets");
  CHECK(aligned::blocks_for(9, 132) == 9, "one tile for each block");
  CHECK(aligned::blocks_for(100000, 132) == 25000, "blocks take four tiles");
  CHECK(aligned::blocks_for(int64_t{1} << 40, 132) == INT32_MAX, "the largest grid");
}

// ---- 2. Signals among threads ----

struct ThreadMemory {
  static uint64_t load_acquire(uint64_t* at) {
    return std::atomic_ref(*at).load(std::memory_order_acquire);
  }
  template <typename Word>
  static void store_release(Word* at, Word value) {
    std::atomic_ref(*at).store(value, std::memory_order_release);
  }
  static void fence() {}
  static uint64_t now() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<uint64_t>(std::chrono::nanoseconds(since).count());
  }
  static void pause() { std::this_thread::yield(); }
};

constexpr uint64_t kLong = uint64_t{120} * 1000 * 1000 * 1000;

struct Rank {
  std::array<Mailbox, 2 * kMostPeers> mailboxes{};
  uint64_t done = 0;
  uint32_t fault = 0;
  Report report{};
};

// The exchanges of all ranks. Ranks that pass different digests disagree.
class World {
 public:
  explicit World(int size) : ranks_(static_cast<size_t>(size)) {}
  Rank& operator[](int rank) { return ranks_[static_cast<size_t>(rank)]; }

  void exchange_as(int rank, uint64_t digest, uint64_t timeout_ns = kLong) {
    const auto size = static_cast<int>(ranks_.size());
    Rank& mine = (*this)[rank];
    Signals signals{.rank = rank, .size = size, .done = &mine.done, .timeout_ns = timeout_ns};
    for (int peer = 0; peer < size; ++peer) signals.at_peer[peer] = (*this)[peer].mailboxes.data();
    signals.notice.digest = digest;
    std::fill(std::begin(signals.notice.words), std::end(signals.notice.words),
              100 * digest + static_cast<uint64_t>(rank));
    signals.fault = &mine.fault;
    signals.report = &mine.report;
    HostGroup<32> group(rank % 2 == 1);
    exchange<ThreadMemory>(group, signals);
  }
  void in_threads(const std::function<void(int)>& work) {
    std::vector<std::jthread> threads;
    for (size_t rank = 0; rank < ranks_.size(); ++rank)
      threads.emplace_back(work, static_cast<int>(rank));
  }

 private:
  std::vector<Rank> ranks_;
};

void test_signals() {
  {  // Data written before an exchange is visible after it, in every repetition.
    World world(4);
    constexpr int kTimes = 300;
    std::vector<std::array<int, 2>> written(4);
    std::atomic<int> wrong = 0;
    world.in_threads([&](int rank) {
      for (int i = 1; i <= kTimes; ++i) {
        written[static_cast<size_t>(rank)][i % 2] = i;
        world.exchange_as(rank, static_cast<uint64_t>(i));
        for (const auto& of_peer : written) wrong += of_peer[i % 2] != i;
      }
    });
    CHECK(wrong == 0, join(wrong.load(), " stale words"));
    for (int rank = 0; rank < 4; ++rank)
      CHECK(world[rank].done == kTimes && world[rank].fault == 0 && world[rank].report.status == 0,
            join("rank ", rank));
  }
  {  // A single rank does not wait.
    World world(1);
    world.exchange_as(0, 1);
    CHECK(world[0].done == 1 && world[0].fault == 0, "alone");
  }
  {  // A late rank: its peers name it, and it gets an error when it arrives.
    World world(3);
    world.in_threads([&](int rank) {
      if (rank != 1) world.exchange_as(rank, 1, 200 * 1000 * 1000);
    });
    for (const int rank : {0, 2}) {
      const Report& report = world[rank].report;
      // Rank 0 may give up before rank 2 checks rank 1. Rank 2 then reports rank 0.
      const bool late = report.status == CGX_TIMEOUT && report.rank == 1;
      const bool peer_failed = report.status == CGX_PEER_FAILED && report.rank == 2 - rank;
      CHECK((late || peer_failed) && report.exchange == 1, join("rank ", rank));
      CHECK(world[rank].fault == 1 && world[rank].done == 0, join("rank ", rank));
    }
    world.exchange_as(1, 1);
    CHECK(world[1].report.status == CGX_PEER_FAILED && world[1].report.rank == 0, "the late one");
  }
  {  // A rank that failed earlier: its report is unchanged, and its peer reports the failure.
    World world(2);
    world[0].fault = 7;
    world[0].report.status = CGX_SYSTEM;
    world.in_threads([&](int rank) { world.exchange_as(rank, 1); });
    CHECK(world[0].report.status == CGX_SYSTEM && world[0].report.exchange == 0,
          "the first report is unchanged");
    CHECK(world[1].report.status == CGX_PEER_FAILED && world[1].report.rank == 0,
          "the peer reports it");
    world.exchange_as(1, 1);
    CHECK(world[1].report.exchange == 1, "once");
  }
  {  // Ranks that disagree: each report contains both notices.
    World world(2);
    world.in_threads([&](int rank) {
      world.exchange_as(rank, 1);
      world.exchange_as(rank, rank == 0 ? 2 : 3);
    });
    for (int rank = 0; rank < 2; ++rank) {
      const Report& report = world[rank].report;
      // The first rank to detect it gives up only later exchanges, so the other does, too.
      CHECK(report.status == CGX_MISMATCH, join("rank ", rank));
      CHECK(report.rank == 1 - rank && report.exchange == 2, join("rank ", rank));
      CHECK(report.ours.digest == (rank == 0 ? 2u : 3u), join("rank ", rank));
      const auto digest = static_cast<uint64_t>(rank == 0 ? 3 : 2);
      const uint64_t word = 100 * digest + static_cast<uint64_t>(1 - rank);
      CHECK(report.theirs.digest == digest && report.theirs.words[30] == word, "the peer's notice");
    }
    // A later exchange reports the failure.
    world[0].fault = world[1].fault = 0;
    world[1].done = 2;
    world.exchange_as(1, 9);
    CHECK(world[1].report.exchange == 2 && world[1].fault == kFailedAndNotified,
          "a later exchange");
  }
}

}  // namespace
}  // namespace cgx::device::cuda

int main() {
  cgx::device::cuda::test_assignment();
  cgx::device::cuda::test_work();
  cgx::device::cuda::test_signals();
  return cgx::test::report();
}
