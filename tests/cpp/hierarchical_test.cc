// The hierarchical allreduce with threads as ranks on simulated hosts: exact results, many calls in
// flight, flow control, leaving ranks, and the topology. `make sanitize` runs it under
// ThreadSanitizer and AddressSanitizer. tests/core/test_hierarchical.py checks the bits.
#include <numeric>

#include "algorithm/algorithm.h"
#include "base/topology.h"
#include "ranks_on_hosts.h"

namespace {

void test_topology() {
  const cgx::Topology topology({0, 1, 1, 0, 1, 2, 2});
  CHECK(topology.size() == 7 && topology.hosts() == 3 && topology.lanes() == 2, "counts");
  CHECK(topology.nested(), "nested with three hosts");
  CHECK(topology.ranks_of(0) == (Hosts{0, 3}) && topology.ranks_of(1) == (Hosts{1, 2, 4}), "ranks");
  CHECK(topology.local_rank(3) == 1 && topology.local_rank(4) == 2 && topology.host_of(5) == 2,
        "rank");
  CHECK(!cgx::Topology({0, 0, 0}).nested() && !cgx::Topology({0, 1, 2}).nested(),
        "nested with one level");
  CHECK(cgx::number_hosts<std::string>({"b", "a", "b", "c"}) == (Hosts{0, 1, 0, 2}), "numbers");
}

// Headers may carry values that fit, even if many ranks share the link of a host.
void test_auto() {
  Hosts hosts;
  for (int rank = 0; rank < 64; ++rank) hosts.push_back(rank / 16);
  const auto picked = [&](int64_t bytes) {
    cgx::Plan plan;
    plan.algorithm = CGX_AUTO;
    plan.size = static_cast<int>(hosts.size());
    plan.topology = std::make_shared<const cgx::Topology>(hosts);
    cgx::Segment segment;
    segment.numel = bytes / 4;
    segment.codecs.each.fill({.bits = cgx::kExactBits});
    plan.segments.push_back(segment);
    cgx::resolve_algorithm(&plan);
    return plan.algorithm;
  };
  CHECK(picked(cgx::kHeaderBytes) == CGX_ONE_SHOT, "values of a header's length");
  CHECK(picked(cgx::kHeaderBytes + 4) == CGX_HIERARCHICAL, "values longer than a header");
}

// Sums of small integers are exact in fp32. At 4 bits, all ranks have the same bits.
void test_results(const Hosts& hosts) {
  const Ranks ranks = ranks_on(hosts, "results");
  const auto value = [](int rank, int64_t i) {
    return static_cast<float>((i * 31 + rank * 17) % 201 - 100);
  };
  for (const int64_t numel : {0, 1, 16, 513, 300'007}) {
    for (const auto& [bits, intra_bits] : {std::pair{32, 0}, {4, 0}, {4, 8}}) {
      std::vector<std::vector<float>> results(hosts.size());
      ranks.run([&](int rank, int32_t comm) {
        auto& values = results[rank];
        for (int64_t i = 0; i < numel; ++i) values.push_back(value(rank, i));
        Allreduce allreduce(comm, &values, bits);
        allreduce.call.config.algorithm = CGX_HIERARCHICAL;
        allreduce.call.config.intra_bits = intra_bits;
        ok(allreduce.run());
      });
      for (const auto& result : results) CHECK(result == results[0], "numel %ld", long(numel));
      for (int64_t i = 0; i < numel && bits == 32; ++i) {
        float sum = 0;
        for (size_t rank = 0; rank < hosts.size(); ++rank) sum += value(static_cast<int>(rank), i);
        CHECK(results[0][i] == sum, "%g, not %g at %ld", results[0][i], sum, long(i));
      }
    }
  }
}

// Each rank starts the collectives in a different order.
void test_many_in_flight(const Hosts& hosts) {
  constexpr int kCalls = 300;
  const Ranks ranks = ranks_on(hosts, "many_in_flight");
  const auto size = static_cast<int>(hosts.size());
  ranks.run([&](int rank, int32_t comm) {
    std::vector<std::vector<float>> values(kCalls);
    std::vector<cgx_request_t*> requests(kCalls);
    for (int i = 0; i < kCalls; ++i) {
      const int call = (i * 7 + rank * 13) % kCalls;
      values[call].assign(call * 37, static_cast<float>(call + rank));
      Allreduce allreduce(comm, &values[call], call % 2 ? 32 : 8, "call " + std::to_string(call));
      allreduce.call.config.algorithm = CGX_HIERARCHICAL;
      allreduce.call.config.intra_bits = call % 3 ? 0 : 8;
      requests[call] = allreduce.start();
    }
    for (auto* request : requests) ok(cgx_wait(request));
    for (int call = 0; call < kCalls; ++call) {
      // All values in a bucket are equal, so 8 bits are exact.
      const auto sum = static_cast<float>(size * call + size * (size - 1) / 2);
      for (const float got : values[call]) CHECK(got == sum, "%g, not %g in %d", got, sum, call);
    }
  });
}

// Shards have hundreds of chunks, and rank `late` starts late. Earlier ranks stop at
// kMostUnreleased messages, and continue later.
void test_flow_control(const Hosts& hosts, size_t late) {
  const Ranks ranks = ranks_on(hosts, "flow_control");
  ranks.run([&](int rank, int32_t comm) {
    std::vector<float> values(3'000'000, static_cast<float>(rank));
    Allreduce allreduce(comm, &values, 32);
    allreduce.call.config.algorithm = CGX_HIERARCHICAL;
    if (static_cast<size_t>(rank) == late)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ok(allreduce.run());
    const auto size = static_cast<int>(hosts.size());
    for (const float got : values) CHECK(got == size * (size - 1) / 2, "%g", got);
  });
}

// A collective that all ranks started completes on all ranks, even if the next one fails early.
void test_leaving_rank(const Hosts& hosts, int leaver) {
  Ranks ranks = ranks_on(hosts, "leaving");
  ranks.run([&](int rank, int32_t comm) {
    std::vector<float> values(100'000, 1.0f);
    Allreduce first(comm, &values, 4), second(comm, &values, 4);
    first.call.config.algorithm = second.call.config.algorithm = CGX_HIERARCHICAL;
    ok(first.run());
    CHECK(values[99'999] == static_cast<float>(hosts.size()), "%g", values[99'999]);
    if (rank != leaver) CHECK(second.run() == CGX_PEER_FAILED, "%s", cgx_last_error());
    ok(cgx_comm_close(comm));
  });
  ranks.comms.clear();
}

}  // namespace

int main() {
  test_topology();
  test_auto();
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 1, 0, 1}, Hosts{0, 0, 0, 1},
                             Hosts{0, 0, 1, 2}, Hosts{0, 1, 1, 1, 2, 2, 0, 0}}) {
    test_results(hosts);
    test_many_in_flight(hosts);
    test_leaving_rank(hosts, 1);
  }
  for (const size_t late : {0, 1, 3}) {
    test_flow_control({0, 0, 1, 1}, late);
    test_flow_control({0, 0, 0, 1, 2, 2}, late);
  }
  ok(cgx_finalize());
}
