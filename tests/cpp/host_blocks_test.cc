// Hierarchical reduce_scatter and all_gather with threads as ranks on simulated hosts: exact
// results, many calls in flight, flow control, and leaving ranks. `make sanitize` runs it under
// ThreadSanitizer and AddressSanitizer. tests/core/test_host_blocks.py checks the bits.
#include "algorithm/host_blocks.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "ranks_on_hosts.h"

namespace {

// A reduce_scatter or all_gather of one fp32 segment.
struct OnBlocks {
  OnBlocks(int32_t comm, cgx_verb_t verb, int64_t block, int bits, const std::vector<float>& input,
           std::vector<float>* output, const std::string& name = "")
      : name_(name), segment_{0, block, 512, bits, 0, nullptr} {
    call = cgx::make<cgx_collective_t>();
    call.comm = comm;
    call.verb = verb;
    call.op = CGX_SUM;
    call.config.algorithm = CGX_HIERARCHICAL;
    call.input = input.data();
    call.output = output->data();
    call.occurrence = -1;
  }
  cgx_status_t start(cgx_request_t** request) {
    call.segments = &segment_;
    call.num_segments = 1;
    call.name = name_.c_str();
    return cgx_start(&call, nullptr, nullptr, request);
  }
  cgx_status_t run() {
    cgx_request_t* request = nullptr;
    ok(start(&request));
    return cgx_wait(request);
  }

  cgx_collective_t call;

 private:
  std::string name_;
  cgx_segment_t segment_;
};

void test_delegates() {
  // Host 0: ranks 0, 2 and 3; host 1: 1 and 4; host 2: 5.
  const cgx::Topology topology({0, 1, 0, 0, 1, 2});
  const auto handlers = [&](int host) {
    Hosts ranks;
    for (int block = 0; block < topology.size(); ++block)
      ranks.push_back(cgx::handler_of(topology, host, block));
    return ranks;
  };
  CHECK(handlers(0) == (Hosts{0, 0, 2, 3, 2, 0}), "host 0");
  CHECK(handlers(1) == (Hosts{1, 1, 4, 1, 4, 1}), "host 1");
  CHECK(handlers(2) == (Hosts{5, 5, 5, 5, 5, 5}), "host 2");
  CHECK(cgx::delegated_to(topology, 0) == (Hosts{1, 5}), "rank 0");
  CHECK(cgx::delegated_to(topology, 4) == (Hosts{2}), "rank 4");
  CHECK(cgx::delegated_to(topology, 5) == (Hosts{0, 1, 2, 3, 4}), "rank 5");
  CHECK(cgx::delegated_to(topology, 3).empty(), "rank 3");
}

float value(int rank, int64_t i) { return static_cast<float>((i * 31 + rank * 17) % 201 - 100); }

// Sums of small integers are exact in fp32. Gathered values are equal on all ranks.
void test_results(const Hosts& hosts, int64_t block, int bits, int late = -1) {
  const Ranks ranks = ranks_on(hosts, "results");
  const auto size = static_cast<int>(hosts.size());
  std::vector<std::vector<float>> gathered(size);
  ranks.run([&](int rank, int32_t comm) {
    std::vector<float> input(size * block), output(block);
    for (size_t i = 0; i < input.size(); ++i) input[i] = value(rank, static_cast<int64_t>(i));
    gathered[rank].resize(size * block);
    if (rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ok(OnBlocks(comm, CGX_REDUCE_SCATTER, block, bits, input, &output).run());
    for (int64_t i = 0; i < block && bits == 32; ++i) {
      float sum = 0;
      for (int from = 0; from < size; ++from) sum += value(from, rank * block + i);
      CHECK(output[i] == sum, "%g, not %g at %ld of rank %d", output[i], sum, long(i), rank);
    }
    if (rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ok(OnBlocks(comm, CGX_ALL_GATHER, block, bits, input, &gathered[rank]).run());
    for (int64_t i = 0; i < size * block && bits == 32; ++i) {
      const auto from = static_cast<int>(i / block);
      CHECK(gathered[rank][i] == value(from, i % block), "%g at %ld", gathered[rank][i], long(i));
    }
  });
  for (const auto& each : gathered) CHECK(each == gathered[0], "block %ld", long(block));
}

// Each rank starts the collectives in a different order.
void test_many_in_flight(const Hosts& hosts) {
  constexpr int kCalls = 100;
  const Ranks ranks = ranks_on(hosts, "many_in_flight");
  const auto size = static_cast<int>(hosts.size());
  ranks.run([&](int rank, int32_t comm) {
    std::vector<std::vector<float>> inputs(kCalls), outputs(kCalls);
    std::vector<cgx_request_t*> requests(kCalls);
    for (int i = 0; i < kCalls; ++i) {
      const int call = (i * 7 + rank * 13) % kCalls;
      const bool scatters = call % 2;
      inputs[call].assign(call * 37 * (scatters ? size : 1), static_cast<float>(call + rank));
      outputs[call].resize(call * 37 * (scatters ? 1 : size));
      OnBlocks each(comm, scatters ? CGX_REDUCE_SCATTER : CGX_ALL_GATHER, call * 37,
                    call % 3 ? 32 : 8, inputs[call], &outputs[call],
                    "call " + std::to_string(call));
      each.call.config.intra_bits = call % 5 ? 0 : 8;
      ok(each.start(&requests[call]));
    }
    for (auto* request : requests) ok(cgx_wait(request));
    for (int call = 0; call < kCalls; ++call) {
      // All values in a bucket are equal, so 8 bits are exact.
      for (size_t i = 0; i < outputs[call].size(); ++i) {
        const int from = static_cast<int>(i) / (call * 37);
        const auto right =
            static_cast<float>(call % 2 ? size * call + size * (size - 1) / 2 : call + from);
        CHECK(outputs[call][i] == right, "%g, not %g in %d", outputs[call][i], right, call);
      }
    }
  });
}

// A collective that all ranks started completes on all ranks, even if the next one fails early.
void test_leaving_rank(const Hosts& hosts, cgx_verb_t verb, int leaver) {
  Ranks ranks = ranks_on(hosts, "leaving");
  ranks.run([&](int rank, int32_t comm) {
    constexpr int64_t kBlock = 100'000;
    const std::vector<float> input(kBlock * hosts.size(), 1.0f);
    std::vector<float> output(input.size());
    ok(OnBlocks(comm, verb, kBlock, 4, input, &output).run());
    const auto right = verb == CGX_ALL_GATHER ? 1.0f : static_cast<float>(hosts.size());
    CHECK(output[kBlock - 1] == right, "%g", output[kBlock - 1]);
    if (rank != leaver)
      CHECK(OnBlocks(comm, verb, kBlock, 4, input, &output).run() == CGX_PEER_FAILED, "%s",
            cgx_last_error());
    ok(cgx_comm_close(comm));
  });
  ranks.comms.clear();
}

}  // namespace

int main() {
  test_delegates();
  for (const Hosts& hosts :
       {Hosts{0, 0, 1, 1}, Hosts{0, 1, 0, 1}, Hosts{0, 0, 0, 1}, Hosts{0, 1, 1, 1, 2, 2, 0, 0}}) {
    for (const int64_t block : {0, 1, 17, 513, 100'007})
      for (const int bits : {32, 4}) test_results(hosts, block, bits);
    test_many_in_flight(hosts);
    for (const cgx_verb_t verb : {CGX_REDUCE_SCATTER, CGX_ALL_GATHER})
      test_leaving_rank(hosts, verb, 1);
  }
  // Blocks have hundreds of chunks, and a rank starts late.
  for (const int late : {0, 1, 3}) {
    test_results({0, 0, 1, 1}, 3'000'000, 32, late);
    test_results({0, 0, 0, 1, 2, 2}, 2'000'000, 32, late);
  }
  ok(cgx_finalize());
}
