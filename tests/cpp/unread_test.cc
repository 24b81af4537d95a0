// How much a collective leaves unread before it stops sending: what CGX_FUSION_BUFFER_SIZE_MB
// bounds. The port here never delivers anything, so peers read nothing.
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
    bytes_ += static_cast<int64_t>(bytes);
  }
  int unreleased() const override { return messages_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  int messages_ = 0;
  int64_t bytes_ = 0;
};

// Bytes that rank 0 of `hosts` sends before it is blocked.
int64_t sent_until_blocked(cgx_algorithm_t algorithm, const std::vector<int>& hosts, int bits,
                           int64_t chunk_bytes, int64_t unread_bytes) {
  const cgx_segment_t segment{0, 16 << 20, 512, bits, 0};
  std::vector<float> values(segment.numel), result(segment.numel);
  auto call = make<cgx_collective_t>();
  call.algorithm = algorithm;
  call.segments = &segment;
  call.num_segments = 1;
  call.input = values.data();
  call.output = result.data();
  Plan plan = make_plan(call, 0, static_cast<int>(hosts.size()));
  plan.topology = std::make_shared<Topology>(hosts);
  plan.chunk_bytes = chunk_bytes;
  plan.unread_bytes = unread_bytes;
  const auto made = make_algorithm(std::move(plan));
  DeafPort port;
  made->eager();
  Step step = Step::kWorked;
  while (step == Step::kWorked) step = made->step(port);
  CHECK(step == Step::kBlocked, "algorithm %d ends otherwise", algorithm);
  return port.bytes();
}

void test_limits() {
  struct Row {
    cgx_algorithm_t algorithm;
    std::vector<int> hosts;
    int bits;
  };
  const Row rows[] = {{CGX_SRA, {0, 0}, 32},
                      {CGX_SRA, {0, 0, 0}, 8},
                      {CGX_ONE_SHOT, {0, 0}, 4},
                      {CGX_ONE_SHOT, {0, 0, 0}, 32},
                      {CGX_HIERARCHICAL, {0, 0, 1, 1}, 32},
                      {CGX_HIERARCHICAL, {0, 0, 1, 1}, 8}};
  for (const auto& [algorithm, hosts, bits] : rows) {
    for (const int64_t chunk : {32 << 10, 128 << 10}) {
      const bool nested = algorithm == CGX_HIERARCHICAL;
      // Within hosts values are exact: 4 bytes for 1 of 8 bits, beside headers of buckets.
      const int64_t longest = nested && bits == 8 ? 4 * chunk : chunk;
      const auto peers = static_cast<int64_t>(hosts.size()) - 1;
      // Messages: so many may always go, so that all ranks can go on; and never more.
      const int64_t least = nested ? 8 : algorithm == CGX_SRA ? peers : 1;
      const int64_t most = nested ? 32 : 64;
      const int64_t together = algorithm == CGX_ONE_SHOT ? peers : 1;  // one to each peer
      for (const int64_t limit : {int64_t{1}, 10 * longest, int64_t{1} << 40}) {
        const int64_t sent = sent_until_blocked(algorithm, hosts, bits, chunk, limit);
        const int64_t allowed = std::clamp(limit / longest, least, most) + together - 1;
        CHECK(sent <= allowed * longest, "algorithm %d: %ld bytes, limit %ld", algorithm,
              long(sent), long(limit));
        CHECK(sent > allowed * longest * 3 / 4, "algorithm %d: only %ld bytes, limit %ld",
              algorithm, long(sent), long(limit));
      }
    }
  }
}

}  // namespace

int main() {
  setenv("CGX_THREADS", "1", 1);  // each of them may send one message more
  test_limits();
  std::puts("passed");
}
