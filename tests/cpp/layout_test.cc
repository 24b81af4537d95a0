// Index arithmetic: shards, chunks and pieces cover every element once, and are cut at buckets.
// Each shard of a ring passes every rank once.
#include "algorithm/layout.h"

#include <random>
#include <set>

#include "algorithm/schedule.h"
#include "ranks.h"

namespace {

using namespace cgx;

constexpr int64_t kChunkBytes = 32 * 1024;

cgx_collective_t call_of(int verb, int algorithm, const std::vector<cgx_segment_t>& segments,
                         int gather_bits) {
  static std::byte anywhere[1];
  auto call = make<cgx_collective_t>();
  call.verb = verb;
  call.config.algorithm = algorithm;
  call.config.gather_bits = gather_bits;
  call.segments = segments.data();
  call.num_segments = static_cast<int64_t>(segments.size());
  call.input = call.output = anywhere;
  return call;
}

std::vector<cgx_segment_t> random_segments(std::mt19937& random) {
  std::vector<cgx_segment_t> segments;
  int64_t offset = random() % 5;
  for (unsigned i = 0, count = 1 + random() % 6; i < count; ++i) {
    const int64_t numel = random() % 4 ? random() % 2000 : random() % 300000;
    const int64_t bucket = random() % 3 ? 1 + random() % 700 : 40000;
    const int bits = random() % 5 ? 1 + random() % 8 : 32;
    segments.push_back({offset, numel, bucket, bits, 0, nullptr});
    offset += numel + random() % 3;
  }
  return segments;
}

void check_layout(const Plan& plan, int shards) {
  const Layout layout(plan);
  const int64_t width = plan.bytes(1);
  const bool in_blocks = plan.verb->blocks_in;
  std::vector<int> seen(plan.block_numel * (in_blocks ? plan.size : 1), 0);
  for (int owner = 0; owner < shards; ++owner) {
    const Shard& shard = layout.shard(owner);
    size_t next_piece = 0;
    for (const auto& chunk : shard.chunks) {
      CHECK(chunk.first_piece == next_piece && chunk.last_piece > chunk.first_piece, "gap");
      next_piece = chunk.last_piece;
      int64_t scatter = 0, gather = 0, grains = 0;
      for (size_t i = chunk.first_piece; i < chunk.last_piece; ++i) {
        const Piece& piece = shard.pieces[i];
        const auto& [scattered, scatter_at] = piece.coded[Stage::kScatter];
        const auto& [gathered, gather_at] = piece.coded[Stage::kGather];
        const int64_t grain =
            std::max(scattered->fixed_length()->grain(), gathered->fixed_length()->grain());
        CHECK(piece.first_index % grain == 0, "a cut inside a bucket");
        CHECK(scatter_at == scatter && gather_at == gather, "a gap in the message");
        scatter += scattered->max_bytes(piece.numel);
        gather += gathered->max_bytes(piece.numel);
        grains += (piece.numel + grain - 1) / grain;
        for (int64_t k = 0; k < piece.numel; ++k) ++seen[piece.input_at / width + k];
      }
      for (const auto& [stage, bytes] :
           {std::pair(Stage::kScatter, scatter), std::pair(Stage::kGather, gather)})
        CHECK(chunk.length[stage].least == bytes && chunk.length[stage].most == bytes,
              "the chunk's size is wrong");
      CHECK(std::max(scatter, gather) <= kChunkBytes || grains == 1, "the chunk is too large");
    }
    CHECK(next_piece == shard.pieces.size(), "pieces outside of chunks");
  }
  std::vector<int> expected(seen.size(), 0);
  for (const auto& segment : plan.segments)
    for (int block = 0; block < (in_blocks ? plan.size : 1); ++block)
      for (int64_t k = 0; k < segment.numel; ++k)
        expected[block * plan.block_numel + segment.input_at / width + k] = 1;
  CHECK(seen == expected, "an element is missing or duplicated");
}

void test_layouts() {
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    const auto segments = random_segments(random);
    const int size = 2 + static_cast<int>(random() % 8);
    const int gather_bits = random() % 2 ? 8 : 0;
    check_layout(make_plan(call_of(CGX_ALLREDUCE, CGX_SRA, segments, gather_bits), 0, size), size);
    check_layout(make_plan(call_of(CGX_ALLREDUCE, CGX_ONE_SHOT, segments, gather_bits), 0, size),
                 1);
    check_layout(make_plan(call_of(CGX_REDUCE_SCATTER, CGX_SRA, segments, 0), 0, size), size);
  }
}

// Shards are cut at multiples of Codec::cut(), and messages of at most a grain begin with the
// shard.
void test_codec_without_fixed_length() {
  constexpr int64_t kCut = 4096, kGrain = 65536;
  for (const int64_t numel : {kGrain, 423680L, 3 * kGrain + 17}) {
    for (const int size : {2, 3, 4, 8}) {
      const std::vector<cgx_segment_t> segments{{0, numel, 512, 4, 0, nullptr}};
      cgx_collective_t call = call_of(CGX_ALLREDUCE, CGX_SRA, segments, 0);
      call.config.compressor = CGX_ENTROPY;
      const Layout layout(make_plan(call, 0, size));
      int64_t next = 0, shortest = numel, longest = 0;
      for (int owner = 0; owner < size; ++owner) {
        const Shard& shard = layout.shard(owner);
        const int64_t first = next;
        CHECK(first % kCut == 0 && shard.chunks.size() == shard.pieces.size(), "owner %d", owner);
        for (const Piece& piece : shard.pieces) {
          CHECK(piece.first_index == next && piece.numel > 0 && piece.numel <= kGrain, "a piece");
          next += piece.numel;
          CHECK(piece.numel == kGrain || &piece == &shard.pieces.back(), "a short piece");
        }
        shortest = std::min(shortest, next - first);
        longest = std::max(longest, next - first);
      }
      CHECK(next == numel && longest - shortest < 2 * kCut, "%d shards", size);
    }
  }
}

// The sender and the receiver of a block cut it equally, whatever the sizes of other blocks.
void test_blocks() {
  constexpr int kSize = 3;
  constexpr int64_t kSizes[kSize][kSize] = {{0, 1, 70'000}, {300'000, 17, 0}, {513, 4096, 8}};
  const std::vector<cgx_segment_t> segments{{0, 0, 512, 4, 0, nullptr}};
  for (const int compressor : {CGX_UNIFORM, CGX_ENTROPY}) {
    std::vector<Plan> plans;
    for (int rank = 0; rank < kSize; ++rank) {
      cgx_collective_t call = call_of(CGX_ALL_TO_ALL, CGX_SRA, segments, 0);
      call.config.compressor = compressor;
      int64_t expected[kSize];
      for (int peer = 0; peer < kSize; ++peer) expected[peer] = kSizes[peer][rank];
      call.input_splits = kSizes[rank];
      call.output_splits = expected;
      plans.push_back(make_plan(call, rank, kSize));
      plans.back().chunk_bytes = fitting_chunk_bytes(plans.back(), kChunkBytes);
    }
    for (int from = 0; from < kSize; ++from) {
      for (int to = 0; to < kSize; ++to) {
        const Layout sender(plans[from]), receiver(plans[to]);
        const Shard &sent = sender.shard(to), &received = receiver.received(from);
        CHECK(sent.chunks.size() == received.chunks.size(), "%d to %d", from, to);
        CHECK(sent.pieces.size() == received.pieces.size(), "%d to %d", from, to);
        int64_t next = 0;
        for (size_t i = 0; i < sent.pieces.size(); ++i) {
          CHECK(sent.pieces[i].first_index == next, "piece %zu", i);
          CHECK(received.pieces[i].first_index == next, "piece %zu", i);
          CHECK(received.pieces[i].numel == sent.pieces[i].numel, "piece %zu", i);
          next += sent.pieces[i].numel;
        }
        CHECK(next == (from == to ? 0 : kSizes[from][to]), "%d to %d", from, to);
        for (size_t i = 0; i < sent.chunks.size(); ++i)
          CHECK(sent.chunks[i].length[Stage::kScatter].most ==
                    received.chunks[i].length[Stage::kScatter].most,
                "chunk %zu", i);
      }
    }
  }
}

void test_ring() {
  for (const int size : {2, 3, 4, 8, 11}) {
    for (int rank = 0; rank < size; ++rank) {
      CHECK(ring_left(ring_right(rank, size), size) == rank, "rank %d of %d", rank, size);
      // The right-hand neighbour reduces at hop h + 1 what this rank reduces at hop h. A shard
      // reaches its owner last, and passes each rank once.
      std::set<int> passed{ring_left(rank, size)};
      for (int hop = 1; hop < size; ++hop) {
        const int shard = ring_shard(rank, hop + 1, size);
        CHECK(shard == ring_shard(ring_right(rank, size), hop + 2, size), "hop %d", hop);
        CHECK(passed.insert(shard).second, "shard %d passes rank %d twice", shard, rank);
        CHECK((shard == rank) == (hop == size - 1), "rank %d, hop %d", rank, hop);
      }
    }
  }
}

void test_shards_of_huge_tensors() {
  const int64_t grains = INT64_MAX / 2;
  int64_t next = 0;
  for (int owner = 0; owner < 7; ++owner) {
    const auto range = owned_grains(grains, owner, 7);
    CHECK(range.first == next && range.last > range.first, "owner %d", owner);
    next = range.last;
  }
  CHECK(next == grains, "%ld", long(next));
}

}  // namespace

int main() {
  test_layouts();
  test_codec_without_fixed_length();
  test_blocks();
  test_ring();
  test_shards_of_huge_tensors();
  std::puts("passed");
}
