// The contract of device/queue.h on a GPU: operations and their order, on own and wrapped streams,
// and in CUDA graphs. One test for each guarantee. Exits with 77 without a GPU.
//
// Tests hold queues back by wait_for() on a word that they write later. So they check order and
// non-blocking calls without timing. alarm() ends a test that hangs.
#include <atomic>
#include <cstring>
#include <memory>

#include "on_gpu.h"

namespace {

using namespace cgx;
using namespace cgx::test;

// ---- Queues ----

void test_copy_and_clear() {
  const auto queue = gpu().make_queue();
  const Memory from = pinned(), a = on_device(), b = on_device(), to = pinned();
  fill(from, 1);
  queue->copy(a.get(), from.get(), kBytes);
  queue->copy(b.get(), a.get(), kBytes);
  queue->copy(to.get(), b.get(), kBytes);
  queue->copy(to.get(), from.get(), 0);
  queue->synchronize();
  check_filled(to, 1);
  queue->clear(b.get() + 5, 1001);  // the bytes around the range must not change
  queue->copy(to.get(), b.get(), kBytes);
  queue->synchronize();
  for (size_t i = 0; i < kBytes; ++i)
    CHECK(to.get()[i] == (i >= 5 && i < 1006 ? std::byte{0} : from.get()[i]), "byte %zu", i);
}

void test_nothing_blocks() {
  const auto queue = gpu().make_queue();
  const Memory from = pinned(), a = on_device(), to = pinned();
  std::atomic<int> calls{0};
  Gate gate;
  CHECK(queue->idle(), "an empty queue");
  gate.hold(*queue);
  fill(from, 2);
  for (int round = 0; round < 20; ++round) {
    queue->copy(a.get(), from.get(), kBytes);
    queue->copy(to.get(), a.get(), kBytes);
    queue->call([](void* context) { ++*static_cast<std::atomic<int>*>(context); }, &calls);
  }
  CHECK(!queue->idle() && calls == 0, "%d calls ran before the gate opened", calls.load());
  gate.open();
  queue->synchronize();
  CHECK(queue->idle() && calls == 20, "%d calls", calls.load());
  check_filled(to, 2);
}

// The device calls the host, which answers through pinned memory, as the staged wire does.
void test_call_and_wait_for() {
  struct Service {
    std::atomic<bool> called{false};
    std::byte seen{};
    std::byte* watched = nullptr;
  } service;
  const auto queue = gpu().make_queue();
  const Memory from = pinned(), a = on_device(), sent = pinned(), answer = pinned(), to = pinned();
  Gate gate;
  fill(from, 3);
  service.watched = sent.get() + kBytes - 1;
  queue->copy(a.get(), from.get(), kBytes);
  queue->copy(sent.get(), a.get(), kBytes);
  queue->call(
      [](void* context) {
        auto* to = static_cast<Service*>(context);
        to->seen = *to->watched;  // earlier copies have arrived
        to->called = true;
        to->called.notify_one();
      },
      &service);
  gate.hold(*queue);
  queue->copy(a.get(), answer.get(), kBytes);
  queue->copy(to.get(), a.get(), kBytes);
  service.called.wait(false);
  CHECK(service.seen == from.get()[kBytes - 1], "the call ran before the earlier copy had ended");
  fill(answer, 4);  // changed after the copy from `answer` was queued
  gate.open();
  queue->synchronize();
  check_filled(to, 4);
}

void test_wait_for_at_least() {
  const auto queue = gpu().make_queue();
  Gate gate;
  gate.open(5);
  gate.hold(*queue, 4);
  gate.hold(*queue, 5);
  queue->synchronize();
  gate.hold(*queue, 6);
  CHECK(!queue->idle(), "the wait for 6 ended at 5");
  gate.open(1000);
  queue->synchronize();
  gate.open(0xfffffffe);
  gate.hold(*queue, 1);  // after the wrap-around
  CHECK(!queue->idle(), "the wait ended before the word wrapped around");
  gate.open(3);
  queue->synchronize();
}

void test_events() {
  const auto first = gpu().make_queue(), second = gpu().make_queue();
  const auto event = gpu().make_event();
  const Memory from = pinned(), a = on_device(), to = pinned();
  Gate before, after;
  second->wait_for(*event);  // never recorded
  event->synchronize();
  second->synchronize();
  for (int round = 1; round <= 3; ++round) {  // the same event is recorded several times
    fill(from, round);
    before.hold(*first, 2 * round);
    first->copy(a.get(), from.get(), kBytes);
    first->record(*event);
    second->wait_for(*event);
    after.hold(*first, round);  // queued later: `second` does not wait for it
    second->copy(to.get(), a.get(), kBytes);
    CHECK(!second->idle(), "wait_for() did not wait for the event");
    before.open(2 * round);
    event->synchronize();
    second->synchronize();
    CHECK(!first->idle(), "round %d", round);
    check_filled(to, round);
    after.open(round);
    first->synchronize();
  }
}

// Encodes and decodes exact values, to check that launches are queued. cuda_kernels_test.cc checks
// their results.
void test_launches() {
  constexpr int64_t kNumel = kBytes / sizeof(float);
  const auto queue = gpu().make_queue();
  const Memory from = pinned(), values = on_device(), message = on_device(), result = on_device(),
               fault = on_device(sizeof(uint32_t)), to = pinned();
  for (int64_t i = 0; i < kNumel; ++i)
    reinterpret_cast<float*>(from.get())[i] = static_cast<float>(i) - 0.5f;
  Piece piece{};
  piece.message = message.get();
  piece.numel = kNumel;
  piece.bucket_size = kNumel;
  Encode encode{};
  encode.dtype = Dtype::kFloat32;
  encode.fault = reinterpret_cast<const uint32_t*>(fault.get());
  encode.pieces.count = 1;
  encode.pieces.at[0] = piece;
  encode.pieces.at[0].values = values.get();
  Decode decode{};
  decode.dtype = Dtype::kFloat32;
  decode.fault = encode.fault;
  decode.pieces.count = 1;
  decode.pieces.at[0] = piece;
  decode.pieces.at[0].result = result.get();
  Gate gate;
  gate.hold(*queue);
  queue->copy(values.get(), from.get(), kBytes);
  queue->encode(encode);
  queue->decode(decode);
  queue->copy(to.get(), result.get(), kBytes);
  CHECK(!queue->idle(), "a launch ran before the gate opened");
  gate.open();
  queue->synchronize();
  CHECK(std::memcmp(to.get(), from.get(), kBytes) == 0, "decoded values differ");
}

// Two ranks on one GPU exchange signals; then only one of them does.
void test_signal() {
  constexpr int kRanks = 2;
  struct Control {
    Mailbox mailboxes[2][kRanks];
    uint64_t done;
    uint32_t fault;
  };
  struct Rank {
    std::unique_ptr<Queue> queue = gpu().make_queue();
    Memory control = on_device(sizeof(Control)), report = pinned(sizeof(Report));
    Control* at() const { return reinterpret_cast<Control*>(control.get()); }
    const Report& reported() const { return *reinterpret_cast<const Report*>(report.get()); }
    Control fetched() const {
      const Memory bytes = fetch(control.get(), sizeof(Control));
      return *reinterpret_cast<const Control*>(bytes.get());
    }
  } ranks[kRanks];
  const auto put = [&](int rank, uint64_t timeout_ns) {
    Signals signals{};
    signals.rank = rank;
    signals.size = kRanks;
    for (int peer = 0; peer < kRanks; ++peer)
      signals.at_peer[peer] = &ranks[peer].at()->mailboxes[0][0];
    signals.done = &ranks[rank].at()->done;
    signals.timeout_ns = timeout_ns;
    signals.notice.digest = 17;
    signals.fault = &ranks[rank].at()->fault;
    signals.report = reinterpret_cast<Report*>(ranks[rank].report.get());
    ranks[rank].queue->signal(signals);
  };
  for (int exchange = 0; exchange < 5; ++exchange)
    for (int rank = 0; rank < kRanks; ++rank) put(rank, 60'000'000'000);
  for (auto& rank : ranks) rank.queue->synchronize();
  for (auto& rank : ranks) {
    const Control control = rank.fetched();
    CHECK(control.done == 5 && control.fault == 0 && rank.reported().status == CGX_OK,
          "done %lu, fault %u, status %u", control.done, control.fault, rank.reported().status);
  }
  put(0, 20'000'000);  // the peer never calls
  ranks[0].queue->synchronize();
  CHECK(ranks[0].fetched().fault != 0 && ranks[0].reported().status == CGX_TIMEOUT &&
            ranks[0].reported().rank == 1,
        "status %u, rank %d", ranks[0].reported().status, ranks[0].reported().rank);
  put(1, 60'000'000'000);  // late: reports the failure without waiting for its own deadline
  ranks[1].queue->synchronize();
  CHECK(ranks[1].reported().status == CGX_PEER_FAILED, "status %u", ranks[1].reported().status);
}

// ---- The caller's streams ----

void test_wrap() {
  cudaStream_t own = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
  const Memory from = pinned(), a = on_device(), to = pinned();
  for (cudaStream_t stream : {own, cudaStream_t{nullptr}, cudaStreamLegacy, cudaStreamPerThread}) {
    fill(from, 6);
    Gate gate;
    gate.hold(*gpu().wrap(stream));  // the wrapped queue is destroyed immediately; its work remains
    check_cuda(cudaMemcpyAsync(a.get(), from.get(), kBytes, cudaMemcpyDefault, stream));
    CHECK(cudaStreamQuery(stream) == cudaErrorNotReady, "the stream was not blocked");
    cudaGetLastError();
    const auto queue = gpu().wrap(stream), after = gpu().make_queue();
    queue->clear(a.get(), 1);
    const auto cleared = gpu().make_event();
    queue->record(*cleared);
    after->wait_for(*cleared);
    after->copy(to.get(), a.get(), kBytes);
    gate.open();
    after->synchronize();
    CHECK(to.get()[0] == std::byte{0}, "clear() was not on the stream");
    to.get()[0] = from.get()[0];
    check_filled(to, 6);
  }
  check_cuda(cudaStreamDestroy(own));
}

// Own queues do not synchronize with the default stream, unlike ordinary streams.
void test_own_queues_ignore_the_default_stream() {
  const auto standard = gpu().wrap(nullptr), own = gpu().make_queue();
  const Memory a = on_device();
  Gate gate;
  gate.hold(*standard);
  own->clear(a.get(), kBytes);
  own->synchronize();
  CHECK(!standard->idle(), "the default stream was not blocked");
  gate.open();
  standard->synchronize();
}

// A stream capture that one of our queues joins, and the calls that are allowed during a capture.
void test_recording() {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const Memory from = pinned(), a = on_device(), b = on_device(), to = pinned();
  const auto queue = gpu().wrap(stream), side = gpu().make_queue();
  const auto event = gpu().make_event();
  CHECK(!gpu().recording(stream) && !gpu().recording(nullptr),
        "recording before the capture began");
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  CHECK(gpu().recording(stream) && !gpu().recording(nullptr), "not recording during the capture");
  auto current = gpu().make_current();
  queue->copy(a.get(), from.get(), kBytes);
  queue->record(*event);
  side->wait_for(*event);
  CHECK(gpu().recording(stream), "the capture ended too early");
  side->copy(b.get(), a.get(), kBytes);
  const Memory allocated = on_device(), unrelated = fetch(allocated.get());
  side->record(*event);
  queue->wait_for(*event);
  queue->copy(to.get(), b.get(), kBytes);
  current.reset();
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check_cuda(cudaThreadExchangeStreamCaptureMode(&mode));
  CHECK(mode == cudaStreamCaptureModeGlobal, "the caller's capture mode changed to %d", mode);
  check_cuda(cudaThreadExchangeStreamCaptureMode(&mode));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t run = nullptr;
  check_cuda(cudaStreamEndCapture(stream, &graph));
  check_cuda(cudaGraphInstantiate(&run, graph, 0));
  CHECK(!gpu().recording(stream), "recording after the capture ended");
  CHECK(to.get()[0] == std::byte{0}, "work ran during the capture");
  for (int round = 7; round < 10; ++round) {
    fill(from, round);
    check_cuda(cudaGraphLaunch(run, stream));
    queue->synchronize();
    check_filled(to, round);
  }
  side->synchronize();  // the queue that joined is an ordinary queue again
  side->clear(a.get(), kBytes);
  side->synchronize();
  check_cuda(cudaGraphExecDestroy(run));
  check_cuda(cudaGraphDestroy(graph));
  check_cuda(cudaStreamDestroy(stream));
}

}  // namespace

int main() {
  begin();
  test_copy_and_clear();
  test_nothing_blocks();
  test_call_and_wait_for();
  test_wait_for_at_least();
  test_events();
  test_launches();
  test_signal();
  test_wrap();
  test_own_queues_ignore_the_default_stream();
  test_recording();
}
