// What is around the GPU's kernels, run on the host: how work is dealt out to groups of lanes, and
// Signals among threads. Exits with 1 if any check failed.
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
#include "kernel/cuda/exchange.h"
#include "kernel/cuda/memory.h"
#include "kernel/cuda/work.h"

namespace cgx::device::cuda {
namespace {

// ---- 1. how work is dealt out ----

void test_work() {
  constexpr int64_t kHuge = (int64_t{1} << 33) + 5;  // elements: over 2^32
  Pieces pieces{.count = 6};
  const auto set = [&](int i, int64_t numel, int64_t bucket_size, const Coding& coding) {
    pieces.at[i] = {
        .numel = numel, .bucket_size = bucket_size, .coding = coding, .reduced_coding = coding};
  };
  constexpr Coding kFour{.bits = 4}, kEight{.bits = 8}, kExact{};
  set(0, kHuge, 512, kFour);
  set(1, 0, 512, kFour);
  set(2, kHuge, 1 << 20, kFour);
  set(3, 100, int64_t{1} << 40, kFour);  // shorter than its bucket
  set(4, 5000, 1, kExact);
  set(5, 1025, 1025, kEight);
  cut_exact_pieces(&pieces, true);
  CHECK(pieces.at[4].bucket_size == kMostOfWarp, "exact values have no grid");
  const Work warps = work_for(Formats::kPlain, Takers::kWarps, pieces);
  const Work blocks = work_for(Formats::kPlain, Takers::kBlocks, pieces);
  const int64_t first = kHuge / 512 + 1;
  CHECK(warps.pieces == 3 && warps.buckets == first + 1 + 5, "of warps");
  CHECK(blocks.pieces == 2 && blocks.buckets == kHuge / (1 << 20) + 1 + 1, "of blocks");

  // Every bucket is found, by one search after another and from the start.
  struct Expected {
    int64_t bucket;
    int32_t piece;
    int64_t number;
  };
  int32_t from = 0;
  for (const auto& [bucket, piece, number] :
       {Expected{0, 0, 0}, Expected{first - 1, 0, first - 1}, Expected{first, 3, 0},
        Expected{first + 1, 4, 0}, Expected{first + 5, 4, 4}}) {
    int32_t start = 0;
    for (int32_t* at : {&from, &start}) {
      const Bucket found = find_bucket(warps, bucket, at);
      CHECK(found.piece == piece && found.number == number, join("bucket ", bucket));
    }
  }
  CHECK(bucket_at(first - 1, 512, kFour, 4) == (first - 1) * 264, "beyond 2^32");
  CHECK(bucket_at(0, int64_t{1} << 62, kEight, 4) == 0, "a bucket longer than memory");
  CHECK(field_bytes((int64_t{1} << 62) + 1, kEight) == (int64_t{1} << 62) + 1, "does not overflow");
  CHECK(buckets_of({.numel = 1, .bucket_size = std::numeric_limits<int64_t>::max()}) == 1, "one");

  CHECK(groups_for(Takers::kWarps, 9, 132) == 9, "a bucket a group");
  CHECK(groups_for(Takers::kWarps, int64_t{1} << 40, 132) == 132 * 64, "in turn");
  CHECK(groups_for(Takers::kBlocks, int64_t{1} << 40, 132) == 132 * 4, "in turn");
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

// Ranks' exchanges; change() may alter what a rank launches.
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
  {  // What is written before an exchange is read after it, over and over.
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
  {  // One rank alone has nobody to wait for.
    World world(1);
    world.exchange_as(0, 1);
    CHECK(world[0].done == 1 && world[0].fault == 0, "alone");
  }
  {  // A rank that is late: named by all who waited for it, and told when it comes.
    World world(3);
    world.in_threads([&](int rank) {
      if (rank != 1) world.exchange_as(rank, 1, 200 * 1000 * 1000);
    });
    for (const int rank : {0, 2}) {
      const Report& report = world[rank].report;
      // Rank 0 may give up before rank 2 has looked: then it is rank 0 that failed.
      const bool late = report.status == CGX_TIMEOUT && report.rank == 1;
      const bool told = report.status == CGX_PEER_FAILED && report.rank == 2 - rank;
      CHECK((late || told) && report.exchange == 1, join("rank ", rank));
      CHECK(world[rank].fault == 1 && world[rank].done == 0, join("rank ", rank));
    }
    world.exchange_as(1, 1);
    CHECK(world[1].report.status == CGX_PEER_FAILED && world[1].report.rank == 0, "the late one");
  }
  {  // A rank that had failed before: others hear of it, its report stays.
    World world(2);
    world[0].fault = 7;
    world[0].report.status = CGX_SYSTEM;
    world.in_threads([&](int rank) { world.exchange_as(rank, 1); });
    CHECK(world[0].report.status == CGX_SYSTEM && world[0].report.exchange == 0, "the first stays");
    CHECK(world[1].report.status == CGX_PEER_FAILED && world[1].report.rank == 0, "hears of it");
    world.exchange_as(1, 1);
    CHECK(world[1].report.exchange == 1, "once");
  }
  {  // A rank of another mind: its notice tells of what.
    World world(2);
    world.in_threads([&](int rank) {
      world.exchange_as(rank, 1);
      world.exchange_as(rank, rank == 0 ? 2 : 3);
    });
    for (int rank = 0; rank < 2; ++rank) {
      const Report& report = world[rank].report;
      // Who sees the difference first gives up only later exchanges: the other sees it too.
      CHECK(report.status == CGX_MISMATCH, join("rank ", rank));
      CHECK(report.rank == 1 - rank && report.exchange == 2, join("rank ", rank));
      CHECK(report.ours.digest == (rank == 0 ? 2u : 3u), join("rank ", rank));
      const auto digest = static_cast<uint64_t>(rank == 0 ? 3 : 2);
      const uint64_t word = 100 * digest + static_cast<uint64_t>(1 - rank);
      CHECK(report.theirs.digest == digest && report.theirs.words[30] == word, "its notice");
    }
    // Who comes to a later exchange is told.
    world[0].fault = world[1].fault = 0;
    world[1].done = 2;
    world.exchange_as(1, 9);
    CHECK(world[1].report.exchange == 2 && world[1].fault == kFailedAndNotified, "the next");
  }
}

}  // namespace
}  // namespace cgx::device::cuda

int main() {
  cgx::device::cuda::test_work();
  cgx::device::cuda::test_signals();
  return cgx::test::report();
}
