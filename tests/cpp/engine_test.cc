// The engine with threads as ranks: results, named collectives in any order, mismatches, missing
// and leaving ranks. `make sanitize` runs it under ThreadSanitizer and AddressSanitizer.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <random>

#include "ranks.h"

namespace {

const char* const kTransports[] = {"AUTO", "SHM"};

std::vector<float> values_of(int rank, int64_t numel, int salt) {
  std::mt19937 random(static_cast<unsigned>(rank * 7919 + salt));
  std::vector<float> values(numel);
  for (auto& value : values) value = static_cast<float>(random() % 2001) - 1000.0f;
  return values;
}

// Sums of small integers are exact with every algorithm. At 4 bits, all ranks have the same bits.
void test_results(const char* transport, int size) {
  const Ranks ranks(size, transport, 60, "results");
  for (const int algorithm : {CGX_AUTO, CGX_ONE_SHOT, CGX_SRA, CGX_RING}) {
    for (const int64_t numel : {0, 1, 15, 16, 17, 511, 512, 513, 100003}) {
      std::vector<float> expected(numel, 0);
      for (int rank = 0; rank < size; ++rank) {
        const auto values = values_of(rank, numel, 1);
        for (int64_t i = 0; i < numel; ++i) expected[i] += values[i];
      }
      for (const int bits : {32, 4}) {
        std::vector<std::vector<float>> results(size);
        ranks.run([&](int rank, int32_t comm) {
          results[rank] = values_of(rank, numel, 1);
          Allreduce allreduce(comm, &results[rank], bits);
          allreduce.call.config.algorithm = algorithm;
          allreduce.call.config.rounding = CGX_STOCHASTIC;
          allreduce.call.seed = rank;
          ok(allreduce.run());
        });
        for (int rank = 1; rank < size; ++rank)
          CHECK(results[rank] == results[0], "rank %d, numel %ld, bits %d", rank, long(numel),
                bits);
        if (bits == 32)
          CHECK(results[0] == expected, "numel %ld, algorithm %d", long(numel), algorithm);
      }
    }
  }
}

// Starts `count` named collectives from `starters` threads. Each rank starts them in a different
// order, and all are in flight together.
void test_any_order(const char* transport, int size, int count, int starters) {
  const Ranks ranks(size, transport, 600, "any_order");  // TSan on a busy machine is slow
  const auto numel_of = [](int call) { return (call * 2654435761u >> 7) % 3000; };
  ranks.run([&](int rank, int32_t comm) {
    std::vector<int> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(rank));
    std::vector<std::vector<float>> values(count);
    std::vector<cgx_request_t*> requests(count);
    std::vector<std::thread> threads;
    for (int starter = 0; starter < starters; ++starter)
      threads.emplace_back([&, starter] {
        for (int i = starter; i < count; i += starters) {
          const int call = order[i];
          values[call].assign(numel_of(call), static_cast<float>(call % 1000 + rank));
          Allreduce allreduce(comm, &values[call], call % 2 ? 32 : 8,
                              "call " + std::to_string(call));
          requests[call] = allreduce.start();
        }
        for (int i = starter; i < count; i += starters) ok(cgx_wait(requests[order[i]]));
      });
    for (auto& thread : threads) thread.join();
    for (int call = 0; call < count; ++call) {
      // All values in a bucket are equal, so 8 bits are exact.
      const float expected = static_cast<float>(size * (call % 1000) + size * (size - 1) / 2);
      for (const float value : values[call])
        CHECK(value == expected, "call %d on rank %d: %g, not %g", call, rank, value, expected);
    }
  });
}

void test_mismatch(const char* transport) {
  const Ranks ranks(3, transport, 60, "mismatch");
  std::vector<std::string> errors(3);
  ranks.run([&](int rank, int32_t comm) {
    std::vector<float> values(rank == 2 ? 1001 : 1000, 1.0f);
    CHECK(Allreduce(comm, &values, 4).run() == CGX_MISMATCH, "rank %d", rank);
    errors[rank] = cgx_last_error();
    values.assign(1000, 1.0f);  // the communicator remains usable
    ok(Allreduce(comm, &values, 4).run());
    CHECK(values[999] == 3.0f, "%g", values[999]);
  });
  CHECK(errors[0] == errors[1] && errors[1] == errors[2], "%s", errors[1].c_str());
  CHECK(errors[0].find("numel 1000 against 1001") != std::string::npos, "%s", errors[0].c_str());
}

// Rank 2 announces a ring allreduce, then a callback blocks its engine. The first rank to reach the
// deadline waits only for its neighbour, so it must find out which rank is blocked.
void test_blocked_rank(const char* transport) {
  const Ranks ranks(4, transport, 60, "still");
  std::vector<std::string> errors(4);
  ranks.run([&](int rank, int32_t comm) {
    std::vector<float> values(400'000, 1.0f), few(16, 1.0f);
    Allreduce ring(comm, &values, 32, "ring"), holds(comm, &few, 32, "holds");
    ring.call.config.algorithm = CGX_RING;
    if (rank != 2) ring.call.timeout_s = 1;
    cgx_request_t* around = rank == 2 ? ring.start() : nullptr;
    // By then, rank 2 has announced the ring.
    if (rank != 2) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    cgx_request_t* held = holds.start();
    if (rank == 2) {
      const auto sleep = [](void*, cgx_status_t, const char*) {
        std::this_thread::sleep_for(std::chrono::seconds(3));
      };
      ok(cgx_notify(held, sleep, nullptr));
    }
    ok(cgx_wait(held));
    if (rank != 2) around = ring.start();
    CHECK(cgx_wait(around) != CGX_OK, "rank %d", rank);
    errors[rank] = cgx_last_error();
  });
  for (const std::string& error : errors)
    CHECK(error.find("rank 2 does not answer") != std::string::npos, "%s", error.c_str());
}

void test_absent_rank(const char* transport) {
  const Ranks ranks(4, transport, 0.5, "absent");
  ranks.run([&](int rank, int32_t comm) {
    if (rank == 3) return;
    std::vector<float> values(100000, 1.0f);
    const auto begin = std::chrono::steady_clock::now();
    const cgx_status_t status = Allreduce(comm, &values, 4, "lonely").run();
    const std::string error = cgx_last_error();
    CHECK(status == CGX_TIMEOUT || status == CGX_PEER_FAILED, "%d: %s", status, error.c_str());
    CHECK(error.find("rank 3") != std::string::npos && error.find("lonely") != std::string::npos,
          "%s", error.c_str());
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    CHECK(waited.count() < 30, "%g s", waited.count());
    Allreduce late(comm, &values, 4);
    cgx_request_t* request = nullptr;
    CHECK(cgx_start(&late.call, nullptr, nullptr, &request) == CGX_CLOSED, "rank %d", rank);
  });
}

// Headers carry the values. So rank 2 has all it needs when it arrives, and rank 1 needs only
// rank 2. But rank 0 has given up. `count` calls are in flight. The headers of many calls fill the
// ring in shared memory, so that rank 0's final message does not fit.
void test_late_rank(const char* transport, int count) {
  const Ranks ranks(3, transport, 60, "late");
  const cgx_status_t ends[] = {CGX_TIMEOUT, CGX_PEER_FAILED, CGX_PEER_FAILED};
  std::barrier<> given_up(2);
  ranks.run([&](int rank, int32_t comm) {
    std::vector<std::vector<float>> values(count, std::vector<float>(1900, 1.0f));
    ok(Allreduce(comm, &values[0], 32, "in time").run());
    if (rank == 2) given_up.arrive_and_wait();
    std::vector<cgx_request_t*> requests;
    for (int i = 0; i < count; ++i) {
      Allreduce allreduce(comm, &values[i], 32);
      if (rank == 0) allreduce.call.timeout_s = 0.5;
      cgx_request_t* request = nullptr;
      if (allreduce.start(&request) == CGX_OK)
        requests.push_back(request);
      else
        CHECK(rank == 2 && i > 0, "rank %d: %s", rank, cgx_last_error());
    }
    for (auto* request : requests) {
      const cgx_status_t status = cgx_wait(request);
      const std::string error = cgx_last_error();
      CHECK(status == ends[rank], "rank %d: status %d: %s", rank, status, error.c_str());
      CHECK(error.find("rank 2 has not started it") != std::string::npos, "%s", error.c_str());
    }
    if (rank != 0) return;
    // The engine tells its peers after it has ended the calls, so a moment later than this rank.
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    given_up.arrive_and_wait();
  });
}

void test_leaving_rank(const char* transport) {
  Ranks ranks(3, transport, 60, "leaving");
  ranks.run([&](int rank, int32_t comm) {
    std::vector<float> values(50000, 1.0f);
    ok(Allreduce(comm, &values, 4).run());
    CHECK(values[49999] == 3.0f, "%g", values[49999]);
    // A collective that all ranks started completes on all ranks, even if the next one fails early.
    if (rank != 0)
      CHECK(Allreduce(comm, &values, 4).run() == CGX_PEER_FAILED, "%s", cgx_last_error());
    ok(cgx_comm_close(comm));
  });
  ranks.comms.clear();
}

// An event loop never waits, so each call makes some progress.
void test_polling_without_waiting(const char* transport) {
  const Ranks ranks(3, transport, 20, "polling");
  ranks.run([&](int rank, int32_t comm) {
    std::vector<float> values(300'000, 1.0f);
    Allreduce allreduce(comm, &values, 32);
    cgx_request_t* request = nullptr;
    ok(allreduce.run_for(0, &request));
    int32_t done = request == nullptr;
    while (!done && cgx_wait_for(request, 0, &done) == CGX_OK) std::this_thread::yield();
    CHECK(done && values[299'999] == 3.0f, "rank %d: %g", rank, values[299'999]);
    if (request) ok(cgx_wait(request));
  });
}

// A communicator's collectives count while it is open, being closed and closed.
void test_traffic_only_grows(const char* transport) {
  std::atomic<bool> ended = false;
  std::jthread reads([&] {
    for (cgx_traffic_t last{sizeof(last), 0, 0, 0, 0}; !ended;) {
      cgx_traffic_t now{sizeof(now), 0, 0, 0, 0};
      ok(cgx_traffic(&now));
      CHECK(now.collectives >= last.collectives && now.bytes_sent >= last.bytes_sent,
            "%ld collectives after %ld", long(now.collectives), long(last.collectives));
      last = now;
    }
  });
  for (int repeat = 0; repeat < 50; ++repeat) {
    const Ranks ranks(2, transport, 60, "traffic");
    ranks.run([&](int, int32_t comm) {
      std::vector<float> values(1000, 1.0f);
      ok(Allreduce(comm, &values, 4).run());
    });
  }
  ended = true;
}

// First with no call in flight, then while a collective waits for a rank that is present.
void test_finding_a_lost_rank(const char* transport) {
  Ranks ranks(3, transport, 60, "find");
  ok(cgx_comm_find_lost(ranks.comms[0], 0.05));
  std::vector<float> values(100);
  Allreduce waiting(ranks.comms[2], &values, 32, "waiting");
  cgx_request_t* const request = waiting.start();
  std::jthread finder([&] {
    for (const int rank : {0, 2}) {
      CHECK(cgx_comm_find_lost(ranks.comms[rank], 30) == CGX_PEER_FAILED, "rank %d", rank);
      const std::string error = cgx_last_error();
      CHECK(error.find("rank 1 is lost: it closed the communicator") != std::string::npos, "%s",
            error.c_str());
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the search has begun
  ok(cgx_comm_close(ranks.comms[1]));
  finder.join();
  CHECK(cgx_comm_find_lost(ranks.comms[0], 0) == CGX_PEER_FAILED, "%s", cgx_last_error());
  CHECK(cgx_wait(request) == CGX_PEER_FAILED, "%s", cgx_last_error());
  ranks.comms.erase(ranks.comms.begin() + 1);
}

// Shards of hundreds of chunks, in both directions of a ring.
void test_many_messages(const char* transport) {
  for (const int algorithm : {CGX_RING, CGX_SRA, CGX_ONE_SHOT}) {
    const Ranks ranks(3, transport, 60, "many_messages");
    ranks.run([&](int rank, int32_t comm) {
      std::vector<float> values(3'000'000, static_cast<float>(rank));
      Allreduce allreduce(comm, &values, 32);
      allreduce.call.config.algorithm = algorithm;
      ok(allreduce.run());
      for (const float value : values) CHECK(value == 3.0f, "%g, algorithm %d", value, algorithm);
    });
  }
}

// With more ranks than sra may have messages in flight.
void test_many_ranks() {
  constexpr int kSize = 80;
  const Ranks ranks(kSize, "AUTO", 120, "many_ranks");
  ranks.run([&](int, int32_t comm) {
    std::vector<float> values(20'000, 1.0f);
    Allreduce allreduce(comm, &values, 4);
    allreduce.call.config.algorithm = CGX_SRA;
    ok(allreduce.run());
    CHECK(values[0] == kSize && values.back() == kSize, "%g", values[0]);
  });
}

// One bucket for all values, which is larger than the segment.
void test_one_huge_bucket() {
  const Ranks ranks(2, "AUTO", 60, "huge_bucket");
  ranks.run([&](int, int32_t comm) {
    std::vector<float> values(5000, 2.0f);
    cgx_segment_t segment{0, 5000, INT64_MAX, 4, 0, nullptr};
    Allreduce allreduce(comm, &values, 4);
    allreduce.call.segments = &segment;
    allreduce.call.num_segments = 1;
    for (const int skip : {0, 1}) {
      values.assign(5000, 2.0f);
      allreduce.call.config.skip_incomplete_buckets = skip;
      ok(cgx_run(&allreduce.call));
      CHECK(values[0] == 4.0f && values[4999] == 4.0f, "%g", values[0]);
    }
  });
}

// Rank 0 completes and makes no further call until rank 1 completes. Messages that rank 0 could not
// hand over yet must still be sent.
void test_idle_rank_hands_over(const char* transport) {
  const Ranks ranks(2, transport, 20, "hands_over");
  for (int repeat = 0; repeat < 5; ++repeat) {
    std::barrier<> both_done(2);
    ranks.run([&](int, int32_t comm) {
      std::vector<std::vector<float>> values(60, std::vector<float>(1900, 1.0f));
      std::vector<cgx_request_t*> requests;
      for (auto& each : values) requests.push_back(Allreduce(comm, &each, 32).start());
      for (auto* request : requests) ok(cgx_wait(request));
      both_done.arrive_and_wait();
    });
  }
}

void test_endless_timeout() {
  const Ranks ranks(2, "AUTO", 1e300, "endless");
  ranks.run([&](int, int32_t comm) {
    std::vector<float> values(10, 1.0f);
    ok(Allreduce(comm, &values, 32).run());
  });
}

// Closing a communicator ends the waits of other threads on the same rank.
void test_close_while_waiting(const char* transport) {
  Ranks ranks(2, transport, 100, "close_while_waiting");
  std::vector<float> values(1000, 1.0f);
  cgx_request_t* request = Allreduce(ranks.comms[0], &values, 4).start();
  std::thread waiter([&] { CHECK(cgx_wait(request) == CGX_CLOSED, "%s", cgx_last_error()); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  ok(cgx_comm_close(ranks.comms[0]));
  waiter.join();
  ok(cgx_comm_close(ranks.comms[1]));
  ranks.comms.clear();
}

// An abort ends everything on all ranks within a moment, although a rank reads nothing.
void test_abort(const char* transport) {
  Ranks ranks(3, transport, 100, "abort");
  std::vector<float> values(1 << 20, 1.0f);
  std::vector<cgx_request_t*> requests;
  for (const int32_t comm : {ranks.comms[0], ranks.comms[1]})
    requests.push_back(Allreduce(comm, &values, 4).start());
  const auto begin = std::chrono::steady_clock::now();
  ok(cgx_comm_abort(ranks.comms[0], "it is rebuilt"));
  CHECK(cgx_wait(requests[0]) == CGX_CLOSED, "%s", cgx_last_error());
  CHECK(cgx_wait(requests[1]) == CGX_PEER_FAILED, "%s", cgx_last_error());
  const std::string error = cgx_last_error();
  CHECK(error.find("rank 0 gave up: it is rebuilt") != std::string::npos, "%s", error.c_str());
  CHECK(Allreduce(ranks.comms[2], &values, 4).run() == CGX_PEER_FAILED, "%s", cgx_last_error());
  CHECK(cgx_comm_abort(ranks.comms[0], "again") == CGX_CLOSED, "%s", cgx_last_error());
  CHECK(cgx_comm_abort(ranks.comms[1], nullptr) == CGX_INVALID_ARGUMENT, "%s", cgx_last_error());
  for (const int rank : {1, 2}) ok(cgx_comm_abort(ranks.comms[rank], "it is rebuilt"));
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
  CHECK(waited.count() < 50, "%g s", waited.count());
  ranks.comms.clear();
}

// Starts a call without elements, which only compares its arguments with `peer`.
cgx_request_t* announce(int32_t comm, int32_t peer, const char* name) {
  const int64_t nothing[3] = {};
  const cgx_segment_t segment{0, 0, 512, 32, 0, nullptr};
  auto call = cgx::make<cgx_collective_t>();
  call.comm = comm;
  call.verb = CGX_ALL_TO_ALL;
  call.config.bits = 32;
  call.segments = &segment;
  call.num_segments = 1;
  call.name = name;
  call.occurrence = -1;
  call.input_splits = call.output_splits = nothing;
  call.peer = &peer;
  cgx_request_t* request = nullptr;
  ok(cgx_start(&call, nullptr, nullptr, &request));
  return request;
}

// Rank 1 leaves with an announcement in flight, and rank 0 has one that rank 1 never answers. Only
// these two end: ranks 0 and 2 go on.
void test_announcements(const char* transport) {
  Ranks ranks(3, transport, 60, "announcements");
  const auto [first, leaving, last] = std::array{ranks.comms[0], ranks.comms[1], ranks.comms[2]};
  cgx_request_t* const unmet = announce(first, 1, "unmet");
  cgx_request_t* const ahead = announce(leaving, 0, "ahead");
  const auto begin = std::chrono::steady_clock::now();
  ok(cgx_finish());  // waits for neither
  ok(cgx_comm_close(leaving));
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
  CHECK(waited.count() < 30, "%g s", waited.count());
  ranks.comms.erase(ranks.comms.begin() + 1);

  CHECK(cgx_wait(ahead) == CGX_CLOSED, "%s", cgx_last_error());
  CHECK(cgx_wait(unmet) == CGX_PEER_FAILED, "%s", cgx_last_error());
  const std::string error = cgx_last_error();
  CHECK(error.find("rank 1 is lost: it closed") != std::string::npos, "%s", error.c_str());
  ok(cgx_wait(announce(first, 1, "ahead")));  // rank 1 had announced it
  for (const char* name : {"others", "others", "unmet"}) {
    CHECK(cgx_wait(announce(first, 1, "unmet")) == CGX_PEER_FAILED, "%s", cgx_last_error());
    cgx_request_t* const answer = announce(last, 0, name);
    ok(cgx_wait(announce(first, 2, name)));
    ok(cgx_wait(answer));
  }
}

void test_names() {
  int32_t taken[3], other[2];
  ok(cgx_comm_create_local(3, "names", 10, taken));
  ok(cgx_comm_close(taken[0]));
  CHECK(cgx_comm_create_local(2, "names", 10, other) == CGX_INVALID_ARGUMENT, "names/1 exists");
  int32_t found;
  CHECK(cgx_comm_find("names/0", &found) == CGX_NOT_FOUND, "the failed call left a name behind");
  ok(cgx_comm_close(taken[1]));
  ok(cgx_comm_close(taken[2]));
}

}  // namespace

int main() {
  for (const char* transport : kTransports) {
    for (const int size : {1, 2, 3, 4, 8}) test_results(transport, size);
    test_any_order(transport, 4, 10000, 4);
    test_mismatch(transport);
    test_absent_rank(transport);
    test_blocked_rank(transport);
    for (int repeat = 0; repeat < 20; ++repeat) test_leaving_rank(transport);
    test_polling_without_waiting(transport);
    test_traffic_only_grows(transport);
    test_finding_a_lost_rank(transport);
    test_many_messages(transport);
    test_idle_rank_hands_over(transport);
    test_close_while_waiting(transport);
    test_abort(transport);
    test_announcements(transport);
    std::printf("%s: passed\n", transport);
  }
  for (const char* transport : {"AUTO", "SHM", "TCP"})
    for (const int count : {1, 30}) test_late_rank(transport, count);
  test_many_ranks();
  test_one_huge_bucket();
  test_endless_timeout();
  test_names();
  ok(cgx_finalize());
}
