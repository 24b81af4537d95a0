// Segments at any address, with residuals, while some ranks refuse calls; many calls in flight,
// with threads as ranks. tests/numpy/test_segments.py checks the bits; this test also runs under
// ThreadSanitizer and AddressSanitizer.
#include <algorithm>
#include <memory>
#include <numeric>
#include <random>

#include "ranks.h"

namespace {

constexpr int kRanks = 3;

// Whether the rank refuses the call. No rank refuses every fourth call.
bool refuses(int rank, int call) { return call % 4 == rank; }
int64_t numel_of(int call, int leaf) { return (call * 2654435761u >> 7) % 3000 * (leaf + 1) / 2; }

// One call of a rank: two leaves, each with its own result and residual.
struct Leaves {
  std::vector<float> values[2], results[2], residuals[2];
  std::vector<cgx_segment_t> segments;
  const void* inputs[2];
  void* outputs[2];
  void* lost[2];
  std::string name;
  cgx_collective_t call = cgx::make<cgx_collective_t>();

  Leaves(int32_t comm, int rank, int number) : name("call " + std::to_string(number)) {
    for (int leaf = 0; leaf < 2; ++leaf) {
      const int64_t numel = numel_of(number, leaf);
      values[leaf].assign(numel, static_cast<float>(number % 100 + rank));
      results[leaf].resize(numel);
      residuals[leaf].resize(numel);
      segments.push_back({0, numel, 512, 4, 0, nullptr});
      inputs[leaf] = values[leaf].data();
      outputs[leaf] = results[leaf].data();
      lost[leaf] = residuals[leaf].data();
    }
    call.comm = comm;
    call.name = name.c_str();
    call.occurrence = -1;
    call.segments = segments.data();
    call.num_segments = 2;
    call.inputs = inputs;
    call.outputs = outputs;
    call.residuals = lost;
    call.config.algorithm = number % 3 + 1;
  }

  void check(int number) const {
    // All values in a bucket are equal, so 4 bits are exact.
    const float expected = static_cast<float>(kRanks * (number % 100) + kRanks * (kRanks - 1) / 2);
    for (int leaf = 0; leaf < 2; ++leaf) {
      for (const float value : results[leaf])
        CHECK(value == expected, "%g in call %d", value, number);
      for (const float residual : residuals[leaf])
        CHECK(residual == 0, "%g in call %d", residual, number);
    }
  }
};

void test_refusals_among_other_calls(const char* transport) {
  constexpr int kCalls = 400, kThreads = 2;
  const Ranks ranks(kRanks, transport, 120, "refusals");
  ranks.run([&](int rank, int32_t comm) {
    std::vector<int> order(kCalls);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(rank));
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread)
      threads.emplace_back([&, thread] {
        std::vector<std::unique_ptr<Leaves>> leaves(kCalls);
        std::vector<cgx_request_t*> requests(kCalls);
        for (int i = thread; i < kCalls; i += kThreads) {
          const int call = order[i];
          leaves[call] = std::make_unique<Leaves>(comm, rank, call);
          if (refuses(rank, call))
            ok(cgx_refuse(&leaves[call]->call, CGX_UNSUPPORTED, "not today"));
          else
            ok(cgx_start(&leaves[call]->call, nullptr, nullptr, &requests[call]));
        }
        for (int i = thread; i < kCalls; i += kThreads) {
          const int call = order[i];
          if (refuses(rank, call)) continue;
          const cgx_status_t status = cgx_wait(requests[call]);
          if (call % 4 == kRanks) {
            CHECK(status == CGX_OK, "%s", cgx_last_error());
            leaves[call]->check(call);
          } else {
            CHECK(status == CGX_UNSUPPORTED, "%d: %s", status, cgx_last_error());
            CHECK(std::string(cgx_last_error()).find("not today") != std::string::npos, "%s",
                  cgx_last_error());
          }
        }
      });
    for (auto& thread : threads) thread.join();
  });
}

}  // namespace

int main() {
  for (const char* transport : {"AUTO", "SHM"}) test_refusals_among_other_calls(transport);
  std::puts("ok");
}
