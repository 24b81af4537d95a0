// The codec interface: variable lengths, and validation of messages.
//
//   1. A codec whose length depends on the values (pairs_codec.h) works in every algorithm among
//      threads, beside other codecs in one message, with residuals, and in carried calls.
//   2. For every codec and algorithm, a message that is too short, too long or malformed is an
//      error that names its sender.
#include <cmath>
#include <deque>
#include <numeric>
#include <random>

#include "algorithm/algorithm.h"
#include "algorithm/carried.h"
#include "algorithm/schedule.h"
#include "pairs_codec.h"
#include "ranks.h"

namespace {

using namespace cgx;

constexpr int64_t kSizes[] = {0, 1, 15, 16, 17, 511, 512, 513, 5000, (1 << 20) + 7};

std::vector<float> values_of(int rank, int64_t numel) {
  std::mt19937 random(rank * 1000 + static_cast<unsigned>(numel));
  std::normal_distribution<float> normal;
  std::vector<float> values(numel);
  for (float& value : values) value = normal(random);
  return values;
}

// The decoded value of the pairs codec. Segments of fewer than 16 values are exact.
float kept(float value, int64_t numel) {
  return numel < 16 || std::abs(value) >= 0.5f ? value : 0.0f;
}

// The sum of an element, and the quantization error of each rank, as wire_format.md defines them.
struct Sum {
  float value = 0;
  std::vector<float> lost;
};

Sum sum_of(int algorithm, int owner, int64_t numel, const std::vector<float>& inputs) {
  const int size = static_cast<int>(inputs.size());
  Sum sum{0, std::vector<float>(size, 0.0f)};
  const auto encode = [&](int rank, float value) {
    sum.lost[rank] = value - kept(value, numel);
    return kept(value, numel);
  };
  if (size == 1) return {inputs[0], {0.0f}};
  if (algorithm == CGX_RING) {
    for (int hop = 1; hop <= size; ++hop) {
      const int rank = (owner + hop) % size;
      sum.value = encode(rank, hop == 1 ? inputs[rank] : sum.value + inputs[rank]);
    }
    return sum;
  }
  for (int rank = 0; rank < size; ++rank) {
    const bool raw = algorithm == CGX_SRA && rank == owner;
    const float value = raw ? inputs[rank] : encode(rank, inputs[rank]);
    sum.value = rank == 0 ? value : sum.value + value;
  }
  if (algorithm == CGX_SRA) sum.value = encode(owner, sum.value);
  return sum;
}

// The sums of all elements, and the quantization errors of `rank`.
std::pair<std::vector<float>, std::vector<float>> expected(int algorithm, int size, int rank,
                                                           int64_t numel) {
  std::vector<std::vector<float>> inputs;
  for (int each = 0; each < size; ++each) inputs.push_back(values_of(each, numel));
  std::vector<float> sums, lost;
  const int64_t grain = numel < 16 ? 1 : kPairsGrain, grains = (numel + grain - 1) / grain;
  int owner = 0;
  std::vector<float> values(size);
  for (int64_t i = 0; i < numel; ++i) {
    while (i / grain >= owned_grains(grains, owner, size).last) ++owner;
    for (int each = 0; each < size; ++each) values[each] = inputs[each][i];
    const Sum sum = sum_of(algorithm, owner, numel, values);
    sums.push_back(sum.value);
    lost.push_back(sum.lost[rank]);
  }
  return {sums, lost};
}

cgx_collective_t call_of(const cgx_segment_t* segments, int64_t count, const float* input,
                         float* output) {
  auto call = make<cgx_collective_t>();
  call.segments = segments;
  call.num_segments = count;
  call.input = input;
  call.output = output;
  call.occurrence = -1;
  return call;
}

// ---- 1. variable lengths ----

void test_allreduce(int size, const char* transport) {
  const Ranks ranks(size, transport, 60, "pairs");
  ranks.run([&](int rank, int32_t comm) {
    for (const int algorithm : {CGX_ONE_SHOT, CGX_SRA, CGX_RING}) {
      for (const int64_t numel : kSizes) {
        if (numel > 5000 && size > 3) continue;  // the expected sums take long
        const auto input = values_of(rank, numel);
        std::vector<float> output(numel, -1.0f), lost(numel);
        const cgx_segment_t segment{0, numel, 512, kPairsBits, 0, nullptr};
        void* residuals[] = {lost.data()};
        auto call = call_of(&segment, 1, input.data(), output.data());
        call.comm = comm;
        call.config.algorithm = algorithm;
        call.residuals = residuals;
        ok(cgx_run(&call));
        const auto [sums, errors] = expected(algorithm, size, rank, numel);
        CHECK(output == sums, "%ld values among %d ranks, algorithm %d", long(numel), size,
              algorithm);
        CHECK(lost == errors, "residuals of %ld values among %d ranks, algorithm %d", long(numel),
              size, algorithm);
      }
    }
  });
}

// A rank's own block: reduce_scatter sums other ranks' decoded values with its own, and all_gather
// sends decoded ones.
void test_blocks(int size) {
  const Ranks ranks(size, "AUTO", 60, "blocks");
  ranks.run([&](int rank, int32_t comm) {
    for (const int64_t numel : {17, 999, 1001, 5000}) {
      std::vector<float> inputs;  // of all blocks
      for (int block = 0; block < size; ++block)
        for (const float value : values_of(rank * size + block, numel)) inputs.push_back(value);
      const cgx_segment_t segment{0, numel, 512, kPairsBits, 0, nullptr};
      std::vector<float> sum(numel), gathered(numel * size);
      auto scatter = call_of(&segment, 1, inputs.data(), sum.data());
      scatter.comm = comm;
      scatter.verb = CGX_REDUCE_SCATTER;
      ok(cgx_run(&scatter));
      std::vector<float> expected_sums(numel, 0.0f);
      for (int peer = 0; peer < size; ++peer) {
        const auto block = values_of(peer * size + rank, numel);
        for (int64_t i = 0; i < numel; ++i)
          expected_sums[i] += peer == rank ? block[i] : kept(block[i], numel);
      }
      CHECK(sum == expected_sums, "%ld values of %d ranks", long(numel), size);
      auto gather = call_of(&segment, 1, inputs.data(), gathered.data());
      gather.comm = comm;
      gather.verb = CGX_ALL_GATHER;
      ok(cgx_run(&gather));
      for (int peer = 0; peer < size; ++peer) {
        const auto block = values_of(peer * size, numel);
        for (int64_t i = 0; i < numel; ++i)
          CHECK(gathered[peer * numel + i] == kept(block[i], numel), "block %d, element %ld", peer,
                long(i));
      }
    }
  });
}

// Exact values, buckets and pairs in one message: each segment has the result of a separate call.
void test_mixed_codecs(int algorithm) {
  constexpr int kSize = 3;
  const cgx_segment_t segments[] = {{0, 700, 512, kPairsBits, 0, nullptr},
                                    {700, 1000, 512, 32, 0, nullptr},
                                    {1700, 3000, 512, 4, 0, nullptr},
                                    {4700, 300, 512, kPairsBits, 0, nullptr}};
  const Ranks ranks(kSize, "AUTO", 60, "mixed");
  ranks.run([&](int rank, int32_t comm) {
    const auto input = values_of(rank, 5000);
    std::vector<float> together(5000), alone(5000);
    auto call = call_of(segments, 4, input.data(), together.data());
    call.comm = comm;
    call.op = CGX_AVG;
    call.config.algorithm = algorithm;
    const int64_t seeds[] = {1, 2, 3, 4};
    call.seeds = seeds;
    ok(cgx_run(&call));
    for (int i = 0; i < 4; ++i) {
      auto each = call_of(&segments[i], 1, input.data(), alone.data());
      each.comm = comm;
      each.op = CGX_AVG;
      each.config.algorithm = algorithm;
      each.seeds = &seeds[i];
      ok(cgx_run(&each));
    }
    CHECK(together == alone, "rank %d, algorithm %d", rank, algorithm);
  });
}

void test_carried_one_shot() {
  constexpr int kSize = 3;
  for (const int64_t numel : {0, 17, 5000}) {
    std::vector<std::vector<float>> inputs, outputs(kSize, std::vector<float>(numel));
    std::vector<Bytes> messages(kSize);
    const cgx_segment_t segment{0, numel, 512, kPairsBits, 0, nullptr};
    for (int rank = 0; rank < kSize; ++rank) inputs.push_back(values_of(rank, numel));
    std::deque<Carried> carried;
    Bytes gathered;
    for (int rank = 0; rank < kSize; ++rank) {
      auto call = call_of(&segment, 1, inputs[rank].data(), outputs[rank].data());
      call.config.algorithm = CGX_ONE_SHOT;
      carried.emplace_back(call, rank, kSize, BuffersUsed{});
      messages[rank].resize(carried[rank].gather_bytes(rank));
      carried[rank].encode(messages[rank]);
      gathered.insert(gathered.end(), messages[rank].begin(), messages[rank].end());
    }
    const auto stride = static_cast<int64_t>(messages[0].size());
    for (int rank = 0; rank < kSize; ++rank) {
      carried[rank].decode(gathered);
      CHECK(outputs[rank] == expected(CGX_ONE_SHOT, kSize, rank, numel).first,
            "rank %d, %ld values", rank, long(numel));
    }
    if (numel == 0) continue;
    for (const int64_t length : {int64_t{-1}, stride, int64_t{9}}) {
      std::memcpy(gathered.data() + stride, &length, sizeof(length));
      try {
        carried[0].decode(gathered);
        CHECK(false, "a message of %ld bytes was accepted", long(length));
      } catch (const Error& error) {
        CHECK(std::strstr(error.what(), "rank 1 sent"), "%s", error.what());
      }
    }
  }
}

void test_carried_sra() {
  constexpr int kSize = 2;
  constexpr int64_t kNumel = 5000;
  std::vector<std::vector<float>> inputs, outputs(kSize, std::vector<float>(kNumel));
  const cgx_segment_t segment{0, kNumel, 512, kPairsBits, 0, nullptr};
  for (int rank = 0; rank < kSize; ++rank) inputs.push_back(values_of(rank, kNumel));
  std::deque<Carried> carried;
  std::vector<Bytes> scattered(kSize), reduced(kSize);
  for (int rank = 0; rank < kSize; ++rank) {
    auto call = call_of(&segment, 1, inputs[rank].data(), outputs[rank].data());
    call.config.algorithm = CGX_SRA;
    carried.emplace_back(call, rank, kSize, BuffersUsed{});
    scattered[rank].resize(carried[rank].encoded_at().back());
    carried[rank].encode(scattered[rank]);
  }
  int64_t stride = 0;
  for (int rank = 0; rank < kSize; ++rank) stride = std::max(stride, carried[0].gather_bytes(rank));
  Bytes gathered;
  for (int rank = 0; rank < kSize; ++rank) {
    reduced[rank].resize(stride);
    carried[rank].reduce(scattered[1 - rank], reduced[rank]);
    gathered.insert(gathered.end(), reduced[rank].begin(), reduced[rank].end());
  }
  for (int rank = 0; rank < kSize; ++rank) {
    carried[rank].decode(gathered);
    CHECK(outputs[rank] == expected(CGX_SRA, kSize, rank, kNumel).first, "rank %d", rank);
  }
}

// ---- 2. malformed messages ----

// Discards all messages.
class Sink : public Port {
 public:
  BufferRef allocate(size_t bytes) override {
    memory_.emplace_back(bytes);
    auto buffer = std::make_shared<Buffer>();
    buffer->data = memory_.back().data();
    buffer->capacity = bytes;
    return buffer;
  }
  void send(int, int, const BufferRef&, size_t) override {}
  int unreleased() const override { return 0; }

 private:
  std::deque<Bytes> memory_;
};

struct MessageCase {
  cgx_algorithm_t algorithm;
  std::vector<int> hosts;
  int bits;
  int64_t bucket_size;
  int source, part;
  int64_t valid_bytes;  // bytes of a well-formed message; 0: varies
  cgx_compressor_t compressor = CGX_UNIFORM;
};

// Delivers a message of `bytes` bytes of 0xff and returns the error, "" if there is none.
std::string error_of(const MessageCase& row, int64_t bytes) {
  const auto size = static_cast<int>(row.hosts.size());
  const cgx_segment_t segment{0, 6000, row.bucket_size, row.bits, 0, nullptr};
  std::vector<float> values(6000, 1.0f), results(6000);
  auto call = call_of(&segment, 1, values.data(), results.data());
  call.config.compressor = row.compressor;
  call.config.rounding = CGX_CODECS_OWN;
  Plan plan = make_plan(call, 0, size);
  plan.algorithm = row.algorithm;
  plan.topology = std::make_shared<Topology>(row.hosts);
  resolve_algorithm(&plan);
  const auto algorithm = make_algorithm(std::move(plan));
  Sink port;
  const Bytes message(bytes, std::byte{0xff});
  try {
    algorithm->eager();
    for (int source = 1; source < size; ++source) algorithm->deliver_eager(source, {});
    while (algorithm->step(port) == Step::kWorked) continue;
    for (int source = row.source; source < size; ++source)
      algorithm->deliver(row.part, Arrival(source, {}, message, nullptr, 0));
    while (algorithm->step(port) == Step::kWorked) continue;
  } catch (const Error& error) {
    CHECK(error.status() == CGX_PEER_FAILED, "%s", error.what());
    return error.what();
  }
  return "";
}

void test_malformed_messages() {
  const int64_t exact = 3000 * 4;
  const MessageCase rows[] = {
      {CGX_SRA, {0, 0}, 32, 512, 1, 0, exact},
      {CGX_RING, {0, 0}, 32, 512, 1, 0, exact},
      {CGX_ONE_SHOT, {0, 0}, 32, 512, 1, 0, 6000 * 4},
      {CGX_SRA, {0, 0}, 4, 500, 1, 0, 6 * (8 + 250)},
      {CGX_RING, {0, 0}, 4, 500, 1, 0, 6 * (8 + 250)},
      {CGX_HIERARCHICAL, {0, 0, 1, 1}, 4, 500, 1, 0, 0},
      {CGX_ONE_SHOT, {0, 0}, kPairsBits, 512, 1, 0, 0},
      {CGX_SRA, {0, 0}, kPairsBits, 512, 1, 0, 0},
      {CGX_RING, {0, 0}, kPairsBits, 512, 1, 0, 0},
      // Bytes of 0xff are not valid indices, so that even the right length is an error.
      {CGX_SRA, {0, 0}, 4, 500, 1, 0, 0, CGX_TOPK},
      {CGX_ONE_SHOT, {0, 0}, 4, 500, 1, 0, 0, CGX_TOPK},
      {CGX_SRA, {0, 0}, 4, 500, 1, 0, 6 * (2 + 100), CGX_TERNARY},
      {CGX_SRA, {0, 0}, 4, 500, 1, 0, 6 * 5 * 4, CGX_RANDK},
      {CGX_SRA, {0, 0}, 4, 500, 1, 0, 0, CGX_ENTROPY},
      {CGX_RING, {0, 0}, 4, 500, 1, 0, 0, CGX_ENTROPY},
      {CGX_ONE_SHOT, {0, 0}, 4, 500, 1, 0, 0, CGX_LOSSLESS},
      {CGX_HIERARCHICAL, {0, 0, 1, 1}, 4, 500, 1, 0, 0, CGX_LOSSLESS},
  };
  for (const MessageCase& row : rows) {
    if (row.valid_bytes) CHECK(error_of(row, row.valid_bytes).empty(), "a well-formed message");
    for (const int64_t bytes :
         {int64_t{1}, row.valid_bytes - 1, row.valid_bytes + 1, int64_t{1} << 20}) {
      if (bytes < 1) continue;
      const std::string error = error_of(row, bytes);
      CHECK(error.find("rank 1 sent") == 0, "algorithm %d, %d bits, %ld bytes: '%s'", row.algorithm,
            row.bits, long(bytes), error.c_str());
    }
  }
  // Indices take 13 bytes a bucket: 5 of 500, at 6 bits each. There are 6 buckets.
  const int64_t topk = 6 * (4 + 2 + 5 * 4);
  CHECK(error_of(rows[9], topk).find("rank 1 sent a malformed message: ") == 0, "%s",
        error_of(rows[9], topk).c_str());
  // A possible length of pairs, but not of as many as the message begins with.
  for (int row = 6; row <= 8; ++row) {
    const std::string error = error_of(rows[row], 84);
    CHECK(error.find("rank 1 sent a malformed message: 84 bytes for") == 0, "%s", error.c_str());
  }
}

}  // namespace

int main() {
  add_pairs_codec();
  for (const int size : {1, 2, 3, 4, 8}) test_allreduce(size, "AUTO");
  test_allreduce(3, "SHM");
  for (const int size : {2, 3, 8}) test_blocks(size);
  for (const int algorithm : {CGX_ONE_SHOT, CGX_SRA, CGX_RING}) test_mixed_codecs(algorithm);
  test_carried_one_shot();
  test_carried_sra();
  test_malformed_messages();
  std::puts("passed");
}
