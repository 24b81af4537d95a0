// The wire `nccl` on simulated devices. FakeFabric (fake_device.h) replaces NCCL.
//
//   1. cases: results are bitwise equal to those on CPUs
//   2. agreement: late and disagreeing ranks raise an error before data is exchanged
//   3. watch: a hang on the device ends, and outputs are NaN
//   4. connection failures
#include <barrier>

#include "device_cases.h"

namespace cgx {
namespace {

const char* const kType = "NCCL";
constexpr double kSoon = 2;  // seconds: short deadline, but long enough for busy machines

int exchanges(const Job& job, int rank) { return job.devices[rank]->fabric.exchanges; }

void expect_closed(const Job& job, int rank, FakeQueue& stream, cgx_status_t status) {
  Rank next({}, rank, job.size());
  const std::string text =
      error_of([&] { next.enqueue(*job.communicators[rank], *job.devices[rank], stream); }, status);
  CHECK(contains(text, "closed for GPUs"), "%s", text.c_str());
}

// Blocks later work on a stream until open() is called.
class Gate {
 public:
  explicit Gate(FakeQueue& stream) {
    stream.put([open = open_] { open->wait(false); });
  }
  void open() {
    *open_ = true;
    open_->notify_all();
  }

 private:
  const std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(false);
};

// ---- 1. cases ------------------------------------------------------------------------------

std::vector<Case> cases() {
  std::vector<Case> all = cases_of_lengths({0, 1, 513, 40'000});
  Case rounds;
  rounds.numels = {5'000'000, 17};
  rounds.bits = 32;
  all.push_back(rounds);
  return all;
}

void cases_equal_the_cpus() {
  int64_t compared = 0;
  for (const int size : {2, 3, 5}) {
    const Job job(size, kType);
    for (const Case& one : cases())
      if (size == 2 || one.numels[0] < 100'000) compare(job, one, &compared);
    CHECK(std::string(job.communicators[0]->wire_name()) == "nccl", "%s",
          job.communicators[0]->wire_name());
    CHECK(exchanges(job, 0) > 0, "the library was not used");
  }
  std::printf("%lld cases equal CPU results\n", static_cast<long long>(compared));
}

void many_in_flight_on_several_streams() { compare_many_at_once(Job(3, kType), 12); }

// ---- 2. agreement --------------------------------------------------------------------------

void mismatches_are_reported_before_the_exchange() {
  for (const Disagreement& each : kDisagreements) {
    const Job job(2, kType);
    job.run([&](int rank) {
      FakeQueue stream(rank);
      Communicator& communicator = *job.communicators[rank];
      Rank call({}, rank, job.size(), "mine");
      const auto before = call.result();
      if (rank == 1) each.change(&call);
      const std::string text =
          error_of([&] { call.enqueue(communicator, *job.devices[rank], stream); }, CGX_MISMATCH);
      CHECK(contains(text, each.library), "%s", text.c_str());
      stream.synchronize();
      CHECK(exchanges(job, rank) == 0 && call.result() == before, "rank %d exchanged data", rank);
      expect_closed(job, rank, stream, CGX_MISMATCH);
    });
  }
}

void a_missing_rank_is_a_timeout_of_the_call() {
  const Job job(3, kType);
  std::barrier<> all(job.size());
  job.run([&](int rank) {
    FakeQueue stream(rank);
    Communicator& communicator = *job.communicators[rank];
    Rank good({}, rank, job.size()), lonely({}, rank, job.size(), "lonely");
    good.enqueue(communicator, *job.devices[rank], stream);
    communicator.check_devices(true);
    const int before = exchanges(job, rank);
    all.arrive_and_wait();
    if (rank == 1) return all.arrive_and_wait();  // stays alive until the others have failed
    lonely.call.timeout_s = 0.3;
    try {
      lonely.enqueue(communicator, *job.devices[rank], stream);
      CHECK(false, "rank %d reported no failure", rank);
    } catch (const Error& error) {
      // The second rank may report that the first one gave up.
      const bool expected = error.status() == CGX_TIMEOUT || error.status() == CGX_PEER_FAILED;
      CHECK(expected && contains(error.what(), "'lonely' (number 1)"), "%s", error.what());
    }
    CHECK(exchanges(job, rank) == before, "rank %d exchanged data", rank);
    all.arrive_and_wait();
  });
}

// ---- 3. watch ------------------------------------------------------------------------------

// Both calls are on the stream when the first hangs. The error names the first call.
void test_hang(double timeout_s, const std::function<void(FakeDevice&)>& fault, cgx_status_t status,
               const char* part) {
  const Job job(2, kType);
  std::barrier<> both(job.size());
  job.run([&](int rank) {
    FakeQueue stream(rank);
    Communicator& communicator = *job.communicators[rank];
    FakeDevice& device = *job.devices[rank];
    Rank good({}, rank, job.size()), first({}, rank, job.size(), "first"),
        second({}, rank, job.size());
    good.enqueue(communicator, device, stream);
    communicator.check_devices(true);
    both.arrive_and_wait();
    Gate gate(stream);
    first.call.timeout_s = second.call.timeout_s = timeout_s;
    first.enqueue(communicator, device, stream);
    second.enqueue(communicator, device, stream);
    both.arrive_and_wait();
    fault(device);
    gate.open();
    stream.synchronize();
    CHECK(first.all_nan() && second.all_nan(), "rank %d has outputs that are not NaN", rank);
    const std::string text = error_of([&] { communicator.check_devices(true); }, status);
    CHECK(contains(text, "'first' (number 1)") && contains(text, part), "%s", text.c_str());
    expect_closed(job, rank, stream, status);
    CHECK(device.fabric.aborts > 0, "rank %d did not abort", rank);
  });
}

void hangs_on_the_device_end() {
  test_hang(
      kSoon, [](FakeDevice& device) { device.fabric.delivers = false; }, CGX_TIMEOUT,
      "did not arrive within 2 s");
  test_hang(
      60,
      [](FakeDevice& device) { device.fabric.delivers = false, device.fabric.lost_peer = true; },
      CGX_PEER_FAILED, "lost a peer");
}

// Earlier work on the stream may take longer than the timeout of a collective.
void deadlines_begin_when_the_collective_runs() {
  const Job job(2, kType);
  std::barrier<> both(job.size());
  job.run([&](int rank) {
    FakeQueue stream(rank);
    Communicator& communicator = *job.communicators[rank];
    Rank call({}, rank, job.size());
    both.arrive_and_wait();
    Gate gate(stream);
    call.call.timeout_s = kSoon;
    call.enqueue(communicator, *job.devices[rank], stream);
    std::this_thread::sleep_for(Seconds(1.25 * kSoon));
    both.arrive_and_wait();
    gate.open();
    communicator.check_devices(true);
  });
}

void library_errors_are_errors_of_the_call() {
  const Job job(2, kType);
  job.run([&](int rank) {
    FakeQueue stream(rank);
    Communicator& communicator = *job.communicators[rank];
    FakeDevice& device = *job.devices[rank];
    device.fabric.accepts = false;
    Rank call({}, rank, job.size());
    const std::string text =
        error_of([&] { call.enqueue(communicator, device, stream); }, CGX_SYSTEM);
    CHECK(contains(text, "takes no more"), "%s", text.c_str());
    CHECK(contains(text, "device collective number 0"), "%s", text.c_str());
    stream.synchronize();
    CHECK(call.all_nan(), "rank %d has outputs that are not NaN", rank);
    expect_closed(job, rank, stream, CGX_SYSTEM);
    CHECK(device.fabric.aborts > 0, "rank %d did not abort", rank);
  });
}

// ---- 4. connection failures ----------------------------------------------------------------

void connection_failures_name_the_cause() {
  struct Row {
    std::function<void(FakeDevice&)> change;
    const char* text;
  };
  const Row rows[] = {
      {[](FakeDevice& device) { device.fabric.missing = true; }, "no fake library here"},
      {[](FakeDevice& device) { device.memory_left = 1000; }, "wanted on fake:1"}};
  for (const Row& row : rows) {
    const Job job(3, kType);
    row.change(*job.devices[1]);
    job.run([&](int rank) {
      FakeQueue stream(rank);
      Rank call({}, rank, job.size());
      const std::string text = error_of(
          [&] { call.enqueue(*job.communicators[rank], *job.devices[rank], stream); }, CGX_SYSTEM);
      CHECK(contains(text, "COMMUNICATOR_TYPE NCCL") && contains(text, "nccl: rank 1: ") &&
                contains(text, row.text),
            "%s", text.c_str());
    });
  }
}

void capturing_streams_are_rejected() {
  const Job job(2, kType);
  job.run([&](int rank) {
    FakeQueue stream(rank);
    job.devices[rank]->is_recording = true;
    Rank call({}, rank, job.size());
    const std::string text =
        error_of([&] { call.enqueue(*job.communicators[rank], *job.devices[rank], stream); },
                 CGX_UNSUPPORTED);
    CHECK(contains(text, "capturing") && contains(text, "'nccl'"), "%s", text.c_str());
  });
}

}  // namespace
}  // namespace cgx

int main() {
  using namespace cgx;
  cases_equal_the_cpus();
  many_in_flight_on_several_streams();
  mismatches_are_reported_before_the_exchange();
  a_missing_rank_is_a_timeout_of_the_call();
  hangs_on_the_device_end();
  deadlines_begin_when_the_collective_runs();
  library_errors_are_errors_of_the_call();
  connection_failures_name_the_cause();
  capturing_streams_are_rejected();
  std::puts("fabric_test: passed");
}
