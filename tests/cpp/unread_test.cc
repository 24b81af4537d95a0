// CGX_FUSION_BUFFER_SIZE_MB limits the unread messages of a collective. The port in this test never
// delivers a message, so peers read nothing.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "algorithm/algorithm.h"
#include "base/topology.h"
#include "ranks.h"

namespace {

using namespace cgx;

class UnreadPort : public Port {
 public:
  BufferRef allocate(size_t bytes) override {
    memory_.push_back(std::make_unique<std::byte[]>(bytes));
    auto buffer = std::make_shared<Buffer>();
    buffer->data = memory_.back().get();
    buffer->capacity = bytes;
    return buffer;
  }
  void send(int, int, const BufferRef&, size_t bytes) override {
    ++messages_;
    longest_ = std::max(longest_, static_cast<int64_t>(bytes));
  }
  int unreleased() const override { return messages_; }
  int64_t longest() const { return longest_; }

 private:
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  int messages_ = 0;
  int64_t longest_ = 0;
};

struct Row {
  cgx_verb_t verb;
  cgx_algorithm_t algorithm;
  std::vector<int> hosts;
  int bits;
  int64_t bucket_size;
  int least;     // always allowed, so that all ranks can continue
  int most;      // upper bound, whatever the limit
  int together;  // messages of one step
};

// Runs rank 0 until it returns `end`; the port has counted the messages.
UnreadPort run_until(Step end, const Row& row, int64_t chunk_bytes, int64_t unread_bytes) {
  const auto size = static_cast<int64_t>(row.hosts.size());
  const cgx_segment_t segment{0, 20 << 20, row.bucket_size, row.bits, 0, nullptr};
  // Shared by all runs, to allocate this memory only once.
  static std::vector<float> values(3 * segment.numel), results(3 * segment.numel);
  auto call = make<cgx_collective_t>();
  call.verb = row.verb;
  call.config.algorithm = row.algorithm;
  call.segments = &segment;
  call.num_segments = 1;
  call.input = values.data();
  call.output = results.data();
  Plan plan = make_plan(call, 0, static_cast<int>(size));
  plan.topology = std::make_shared<Topology>(row.hosts);
  resolve_algorithm(&plan);
  plan.chunk_bytes = chunk_bytes;
  plan.unread_bytes = unread_bytes;
  const auto made = make_algorithm(std::move(plan));
  UnreadPort port;
  made->eager();
  Step step = Step::kWorked;
  while (step == Step::kWorked) step = made->step(port);
  CHECK(step == end, "algorithm %d did not reach the expected state", row.algorithm);
  return port;
}

UnreadPort run_until_blocked(const Row& row, int64_t chunk_bytes, int64_t unread_bytes) {
  return run_until(Step::kBlocked, row, chunk_bytes, unread_bytes);
}

UnreadPort run_until_idle(const Row& row, int64_t chunk_bytes, int64_t unread_bytes) {
  return run_until(Step::kIdle, row, chunk_bytes, unread_bytes);
}

void test_limits() {
  const Row rows[] = {
      {CGX_ALLREDUCE, CGX_SRA, {0, 0}, 32, 512, 1, 64, 1},
      {CGX_ALLREDUCE, CGX_SRA, {0, 0, 0}, 8, 512, 2, 64, 1},
      {CGX_ALLREDUCE, CGX_SRA, {0, 0}, 8, 1 << 17, 1, 64, 1},  // buckets longer than a chunk
      {CGX_ALL_GATHER, CGX_AUTO, {0, 0, 0}, 8, 512, 2, 64, 2},
      {CGX_ALL_TO_ALL, CGX_AUTO, {0, 0, 0}, 8, 512, 1, 64, 1},
      {CGX_ALLREDUCE, CGX_ONE_SHOT, {0, 0}, 4, 512, 1, 64, 1},
      {CGX_ALLREDUCE, CGX_ONE_SHOT, {0, 0, 0}, 8, 1 << 17, 1, 64, 2},
      {CGX_ALLREDUCE, CGX_HIERARCHICAL, {0, 0, 1, 1}, 32, 512, 8, 32, 1},
      {CGX_ALLREDUCE, CGX_HIERARCHICAL, {0, 0, 1, 1}, 8, 512, 8, 32, 1},
      {CGX_REDUCE_SCATTER, CGX_HIERARCHICAL, {0, 0, 1}, 32, 512, 3, 32, 1},
      {CGX_ALL_GATHER, CGX_HIERARCHICAL, {0, 0, 1}, 8, 512, 2, 64, 2}};
  for (const Row& row : rows) {
    for (const int64_t chunk : {32 << 10, 128 << 10}) {
      const int64_t longest = run_until_blocked(row, chunk, 1).longest();
      CHECK(longest > chunk * 9 / 10, "messages of %ld bytes", long(longest));
      // A limit just below another message must not allow it.
      for (const int64_t fit : {0, 10, 12}) {
        const int64_t limit = (fit + 1) * longest - 1;
        const auto allowed = std::clamp<int64_t>(fit, row.least, row.most) + row.together - 1;
        const int sent = run_until_blocked(row, chunk, limit).unreleased();
        CHECK(sent <= allowed && sent > allowed - row.together,
              "algorithm %d: %d messages, not %ld", row.algorithm, sent, long(allowed));
      }
    }
    const int sent = run_until_blocked(row, 32 << 10, INT64_MAX).unreleased();
    CHECK(sent >= row.most && sent < row.most + row.together, "algorithm %d: %d messages, not %d",
          row.algorithm, sent, row.most);
  }
}

// A rank sends one wave of chunks and waits for those of its neighbour. The size of a wave is a
// fraction of the limit, but at least one message.
void test_ring() {
  for (const int size : {2, 5}) {
    const Row row{CGX_ALLREDUCE, CGX_RING, std::vector<int>(size, 0), 8, 512, 0, 0, 0};
    const int64_t longest = run_until_idle(row, 32 << 10, 1).longest();
    for (const int64_t fit : {1, 40, 100}) {
      const int started = run_until_idle(row, 32 << 10, fit * longest).unreleased();
      CHECK(started == std::max<int64_t>(1, fit / (4 * (size - 1))), "%d messages", started);
    }
  }
}

// Many waves give the same sums as one.
void test_waves() {
  constexpr int kSize = 3;
  constexpr int64_t kNumel = 3 << 20;
  setenv("CGX_FUSION_BUFFER_SIZE_MB", "1", 1);
  const Ranks ranks(kSize, "AUTO", 60, "waves");
  ranks.run([&](int rank, int32_t comm) {
    std::vector<float> values(kNumel);
    for (int64_t i = 0; i < kNumel; ++i) values[i] = static_cast<float>((i * 7 + rank) % 1000);
    Allreduce allreduce(comm, &values, 32);
    allreduce.call.config.algorithm = CGX_RING;
    ok(allreduce.run());
    for (int64_t i = 0; i < kNumel; ++i) {
      const auto expected =
          static_cast<float>(i * 7 % 1000 + (i * 7 + 1) % 1000 + (i * 7 + 2) % 1000);
      CHECK(values[i] == expected, "%g at %ld", values[i], long(i));
    }
  });
}

}  // namespace

int main() {
  setenv("CGX_THREADS", "1", 1);  // each additional thread may send one more message
  test_limits();
  test_ring();
  test_waves();
  std::puts("passed");
}
