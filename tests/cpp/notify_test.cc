// cgx_notify calls the callback exactly once, with the result of the collective. It may be called
// before, during or after completion. `make sanitize` runs this test under ThreadSanitizer and
// AddressSanitizer.
#include <atomic>
#include <chrono>
#include <semaphore>

#include "ranks.h"

namespace {

const char* const kTransports[] = {"AUTO", "SHM"};
constexpr auto kDeadline = std::chrono::seconds(20);

// Records a callback. It may be destroyed after cgx_wait, which waits for the callback.
struct Recorder {
  std::atomic<int> calls{0};
  cgx_status_t status = CGX_INTERNAL;
  std::string message = "?";
  std::thread::id thread;
  std::binary_semaphore called{0};

  static void call(void* context, cgx_status_t status, const char* message) {
    auto* recorded = static_cast<Recorder*>(context);
    recorded->status = status;
    recorded->message = message;
    recorded->thread = std::this_thread::get_id();
    ++recorded->calls;
    recorded->called.release();
  }
  void notify(cgx_request_t* request) { ok(cgx_notify(request, call, this)); }
  void expect(cgx_status_t wanted) {
    CHECK(called.try_acquire_for(kDeadline), "the callback was not called");
    CHECK(calls == 1 && status == wanted, "%d calls, status %d: %s", calls.load(), status,
          message.c_str());
  }
};

int32_t is_done(cgx_request_t* request) {
  int32_t done = 0;
  ok(cgx_test(request, &done));
  return done;
}

// No rank waits: the progress thread completes the collective and calls the callback.
void test_before_the_end(const char* transport) {
  const Ranks ranks(2, transport, 60, "before");
  std::binary_semaphore asked(0);
  ranks.run([&](int rank, int32_t comm) {
    std::vector<float> values(100'000, 1.0f);
    if (rank == 1) CHECK(asked.try_acquire_for(kDeadline), "rank 0 does not respond");
    cgx_request_t* request = Allreduce(comm, &values, 4).start();
    Recorder recorded;
    recorded.notify(request);
    if (rank == 0) {
      CHECK(recorded.calls == 0 && !is_done(request), "rank 1 has not started it");
      asked.release();
    }
    recorded.expect(CGX_OK);
    CHECK(recorded.message.empty(), "%s", recorded.message.c_str());
    CHECK(values[0] == 2.0f && values.back() == 2.0f, "%g", values[0]);
    ok(cgx_wait(request));
    CHECK(recorded.calls == 1, "%d", recorded.calls.load());
  });
}

void expect_immediate_call(cgx_request_t* request) {
  Recorder recorded;
  recorded.notify(request);
  CHECK(recorded.calls == 1 && recorded.thread == std::this_thread::get_id(), "%d",
        recorded.calls.load());
  recorded.expect(CGX_OK);
  ok(cgx_wait(request));
}

void test_after_the_end(const char* transport) {
  for (const int size : {1, 2}) {
    const Ranks ranks(size, transport, 60, "after");
    ranks.run([&](int, int32_t comm) {
      std::vector<float> values(1000, 1.0f);
      cgx_request_t* request = Allreduce(comm, &values, 4).start();
      while (!is_done(request)) std::this_thread::yield();
      expect_immediate_call(request);
    });
  }
}

void test_once_per_request(const char* transport) {
  const Ranks ranks(2, transport, 60, "once");
  ranks.run([&](int, int32_t comm) {
    std::vector<float> values(1000, 1.0f);
    cgx_request_t* request = Allreduce(comm, &values, 4).start();
    CHECK(cgx_notify(request, nullptr, nullptr) == CGX_INVALID_ARGUMENT, "%s", cgx_last_error());
    Recorder first, second;
    first.notify(request);
    CHECK(cgx_notify(request, Recorder::call, &second) == CGX_INVALID_ARGUMENT, "%s",
          cgx_last_error());
    first.expect(CGX_OK);
    CHECK(cgx_notify(request, Recorder::call, &second) == CGX_INVALID_ARGUMENT, "%s",
          cgx_last_error());
    ok(cgx_wait(request));
    CHECK(second.calls == 0, "%d", second.calls.load());
  });
}

// A deadline, a peer that leaves or aborts, and a close or abort on this rank: the callback gets
// its error.
void test_failures(const char* transport) {
  struct Failure {
    cgx_status_t status;
    const char* text;
    double timeout_s;
    void (*cause)(const Ranks&);
  };
  const Failure failures[] = {
      {CGX_TIMEOUT, "rank 1 has not started it", 0.2, [](const Ranks&) {}},
      {CGX_PEER_FAILED, "rank 1", 60, [](const Ranks& r) { ok(cgx_comm_close(r.comms[1])); }},
      {CGX_CLOSED, "closed on this rank", 60,
       [](const Ranks& r) { ok(cgx_comm_close(r.comms[0])); }},
      {CGX_PEER_FAILED, "rank 1 gave up: rebuilt", 60,
       [](const Ranks& r) { ok(cgx_comm_abort(r.comms[1], "rebuilt")); }},
      {CGX_CLOSED, "rebuilt", 60,
       [](const Ranks& r) { ok(cgx_comm_abort(r.comms[0], "rebuilt")); }},
  };
  for (const auto& failure : failures) {
    for (const bool before : {true, false}) {
      Ranks ranks(2, transport, 60, "failures");
      std::vector<float> values(1000, 1.0f);
      Allreduce allreduce(ranks.comms[0], &values, 4, "lonely");
      allreduce.call.timeout_s = failure.timeout_s;
      cgx_request_t* request = allreduce.start();
      Recorder recorded;
      if (before) recorded.notify(request);
      failure.cause(ranks);
      const auto begin = std::chrono::steady_clock::now();
      while (!is_done(request))
        CHECK(std::chrono::steady_clock::now() - begin < kDeadline, "%s", failure.text);
      if (!before) recorded.notify(request);
      recorded.expect(failure.status);
      CHECK(recorded.message.find(failure.text) != std::string::npos, "%s",
            recorded.message.c_str());
      CHECK(cgx_wait(request) == failure.status, "%s", cgx_last_error());
      CHECK(recorded.message == cgx_last_error(), "%s", cgx_last_error());
      for (const int32_t comm : ranks.comms) cgx_comm_close(comm);  // one of them is closed already
      ranks.comms.clear();
    }
  }
}

// Collectives that complete at any moment around the call of cgx_notify. Another thread of the rank
// waits for a collective that the peer starts last, and also completes the others.
void test_races(const char* transport) {
  constexpr int kRounds = 150, kTogether = 16;
  const Ranks ranks(2, transport, 60, "races");
  std::atomic<int> immediate{0}, later{0};
  ranks.run([&](int rank, int32_t comm) {
    const auto last_of = [&](int waiting) {
      std::vector<float> values(2000, 1.0f);
      ok(Allreduce(comm, &values, 4, "last of " + std::to_string(waiting)).run());
    };
    std::thread driver(last_of, rank);
    std::vector<std::vector<float>> values(kTogether);
    std::vector<cgx_request_t*> requests(kTogether);
    for (int round = 0; round < kRounds; ++round) {
      std::vector<Recorder> recorded(kTogether);
      for (int i = 0; i < kTogether; ++i) {
        values[i].assign(100, 1.0f);
        requests[i] = Allreduce(comm, &values[i], 32, "raced").start();
      }
      while (!is_done(requests[round % kTogether])) {  // the others complete at any moment
      }
      for (int i = 0; i < kTogether; ++i) {
        recorded[i].notify(requests[i]);
        ++(recorded[i].calls == 1 && recorded[i].thread == std::this_thread::get_id() ? immediate
                                                                                      : later);
      }
      for (int i = 0; i < kTogether; ++i) {
        recorded[i].expect(CGX_OK);
        ok(cgx_wait(requests[i]));
        CHECK(recorded[i].calls == 1, "round %d: %d calls", round, recorded[i].calls.load());
        CHECK(values[i][99] == 2.0f, "%g", values[i][99]);
      }
    }
    last_of(1 - rank);
    driver.join();
  });
  std::printf("%s: %d immediate calls, %d later\n", transport, immediate.load(), later.load());
}

// A thread that the callback wakes may call cgx_wait, and so free the request, before cgx_notify
// returns. cgx_wait must not return before the callback does.
void test_wait_in_a_woken_thread(const char* transport) {
  struct Call {
    cgx_request_t* request = nullptr;
    std::binary_semaphore called{0};
    bool returned = false;
  };
  const Ranks ranks(2, transport, 60, "set_off");
  ranks.run([&](int, int32_t comm) {
    std::vector<float> values(1000, 1.0f);
    for (int i = 0; i < 400; ++i) {
      Call call;
      call.request = Allreduce(comm, &values, 32).start();
      std::thread waiter([&] {
        CHECK(call.called.try_acquire_for(kDeadline), "the callback was not called");
        ok(cgx_wait(call.request));
        CHECK(call.returned, "cgx_wait returned during the callback");
      });
      while (i % 2 && !is_done(call.request)) std::this_thread::yield();
      const auto callback = [](void* context, cgx_status_t, const char*) {
        auto* call = static_cast<Call*>(context);
        call->called.release();
        std::this_thread::sleep_for(std::chrono::microseconds(20));
        call->returned = true;
      };
      ok(cgx_notify(call.request, callback, &call));
      waiter.join();
    }
  });
}

}  // namespace

int main() {
  for (const char* transport : kTransports) {
    test_before_the_end(transport);
    test_after_the_end(transport);
    test_once_per_request(transport);
    test_failures(transport);
    test_races(transport);
    test_wait_in_a_woken_thread(transport);
    std::printf("%s: passed\n", transport);
  }
  ok(cgx_finalize());
}
