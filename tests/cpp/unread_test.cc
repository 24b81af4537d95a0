// How much a collective leaves unread before it stops sending: what CGX_FUSION_BUFFER_SIZE_MB
// bounds. The port here never delivers anything, so peers read nothing.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "algorithm/algorithm.h"
#include "base/topology.h"
#include "ranks.h"

namespace {

using namespace cgx;

class DeafPort : public Port {
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
  int least;     // messages that may always be unread, so that all ranks can go on
  int most;      // messages, whatever the limit
  int together;  // messages that are sent at once
};

// What rank 0 sends before it is blocked.
DeafPort run_until_blocked(const Row& row, int64_t chunk_bytes, int64_t unread_bytes) {
  const auto size = static_cast<int64_t>(row.hosts.size());
  const cgx_segment_t segment{0, 20 << 20, row.bucket_size, row.bits, 0};
  // Of every run: memory that is there already.
  static std::vector<float> values(segment.numel), results(3 * segment.numel);
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
  DeafPort port;
  made->eager();
  Step step = Step::kWorked;
  while (step == Step::kWorked) step = made->step(port);
  CHECK(step == Step::kBlocked, "algorithm %d ends otherwise", row.algorithm);
  return port;
}

void test_limits() {
  const Row rows[] = {
      {CGX_ALLREDUCE, CGX_SRA, {0, 0}, 32, 512, 1, 64, 1},
      {CGX_ALLREDUCE, CGX_SRA, {0, 0, 0}, 8, 512, 2, 64, 1},
      {CGX_ALLREDUCE, CGX_SRA, {0, 0}, 8, 1 << 17, 1, 64, 1},  // buckets longer than a chunk
      {CGX_ALL_GATHER, CGX_AUTO, {0, 0, 0}, 8, 512, 2, 64, 2},
      {CGX_ALLREDUCE, CGX_ONE_SHOT, {0, 0}, 4, 512, 1, 64, 1},
      {CGX_ALLREDUCE, CGX_ONE_SHOT, {0, 0, 0}, 8, 1 << 17, 1, 64, 2},
      {CGX_ALLREDUCE, CGX_HIERARCHICAL, {0, 0, 1, 1}, 32, 512, 8, 32, 1},
      {CGX_ALLREDUCE, CGX_HIERARCHICAL, {0, 0, 1, 1}, 8, 512, 8, 32, 1}};
  for (const Row& row : rows) {
    for (const int64_t chunk : {32 << 10, 128 << 10}) {
      const int64_t longest = run_until_blocked(row, chunk, 1).longest();
      CHECK(longest > chunk * 9 / 10, "messages of %ld bytes", long(longest));
      // Less than a whole message more allows no further one.
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

}  // namespace

int main() {
  setenv("CGX_THREADS", "1", 1);  // each of them may send one message more
  test_limits();
  std::puts("passed");
}
