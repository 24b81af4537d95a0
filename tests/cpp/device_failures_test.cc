// Failures of collectives on simulated devices (fake_device.h): late, lost and disagreeing ranks;
// devices that cannot be connected; unsupported calls.
#include "device_cases.h"
#include "registry.h"

namespace cgx {
namespace {

void addresses_of_empty_segments_are_not_checked() {
  const Job job(1, "AUTO");
  FakeQueue stream(0);
  Rank call({.numels = {1000, 0}, .residuals = true}, 0, 1);
  job.devices[0]->freed = call.call.residuals[1];
  call.enqueue(*job.communicators[0], *job.devices[0], stream);
  stream.synchronize();
  job.devices[0]->freed = call.call.residuals[0];
  error_of([&] { call.enqueue(*job.communicators[0], *job.devices[0], stream); },
           CGX_INVALID_ARGUMENT);
}

void the_first_call_has_its_own_deadline() {
  const Job job(2, "SHM", 60);
  job.run([&](int rank) {
    if (rank == 1) return;
    FakeQueue stream(rank);
    Rank call({}, rank, 2);
    call.call.timeout_s = 0.5;
    const std::string text = error_of(
        [&] { call.enqueue(*job.communicators[rank], *job.devices[rank], stream); }, CGX_TIMEOUT);
    CHECK(contains(text, "within 0.5 s"), "%s", text.c_str());
  });
}

void a_missing_rank_is_a_timeout() {
  for (const std::string type : {"SHM", "MPI"}) {
    const Job job(3, type, 60);
    job.run([&](int rank) {
      FakeQueue stream(rank);
      Communicator& communicator = *job.communicators[rank];
      Rank good({}, rank, job.size()), bad({}, rank, job.size(), "lonely"),
          late({}, rank, job.size());
      good.enqueue(communicator, *job.devices[rank], stream);
      communicator.check_devices(true);
      if (rank == 1) return;
      bad.call.timeout_s = 0.3;
      bad.enqueue(communicator, *job.devices[rank], stream);
      late.call.timeout_s = 0.3;
      late.enqueue(communicator, *job.devices[rank],
                   stream);  // queued before the failure
      stream.synchronize();
      CHECK(bad.all_nan() && late.all_nan(), "rank %d has outputs that are not NaN", rank);
      try {
        communicator.check_devices(true);
        CHECK(false, "rank %d reported no failure", rank);
      } catch (const Error& error) {
        const bool expected = error.status() == CGX_TIMEOUT || error.status() == CGX_PEER_FAILED;
        CHECK(expected && contains(error.what(), "closed for GPUs"), "%s", error.what());
      }
      Rank next({}, rank, job.size());
      try {
        next.enqueue(communicator, *job.devices[rank], stream);
        CHECK(false, "rank %d accepted another call", rank);
      } catch (const Error&) {
      }
    });
  }
}

// The engine closes the communicator because of the late rank before any call asks for the failure.
void a_late_rank_is_named_after_the_communicator_is_closed() {
  const Job job(3, "MPI", 60);
  job.run([&](int rank) {
    FakeQueue stream(rank);
    Communicator& communicator = *job.communicators[rank];
    FakeDevice& device = *job.devices[rank];
    Rank good({}, rank, job.size());
    good.enqueue(communicator, device, stream);
    communicator.check_devices(true);
    if (rank == 1) return;
    Rank late({}, rank, job.size()), next({}, rank, job.size());
    late.call.timeout_s = rank == 0 ? 0.3 : 60;  // rank 0 detects it and notifies rank 2
    late.enqueue(communicator, device, stream);
    stream.synchronize();
    CHECK(communicator.closed(), "rank %d", rank);
    const cgx_status_t status = rank == 0 ? CGX_TIMEOUT : CGX_PEER_FAILED;
    const auto check_text = [](const std::string& text) {
      CHECK(contains(text, "'relay 0.0 of a device' (use 1) did not end"), "%s", text.c_str());
      CHECK(contains(text, "rank 1 has not started it"), "%s", text.c_str());
    };
    check_text(error_of([&] { next.enqueue(communicator, device, stream); }, status));
    check_text(error_of([&] { communicator.check_devices(true); }, status));
    check_text(error_of([&] { next.run(communicator); }, CGX_CLOSED));
  });
}

// The work of a collective may ask later.
void failures_are_known_after_the_communicator_is_closed() {
  for (const bool abort : {false, true}) {
    const Job job(2, "SHM", 60);
    job.run([&](int rank) {
      FakeQueue stream(rank);
      const CommunicatorRef& communicator = job.communicators[rank];
      Rank good({}, rank, job.size()), late({}, rank, job.size());
      good.enqueue(*communicator, *job.devices[rank], stream);
      communicator->check_devices(true);
      const int32_t id = Registry::instance().add(communicator);
      late.call.timeout_s = 0.3;
      if (rank == 0) late.enqueue(*communicator, *job.devices[rank], stream);
      CHECK((abort ? cgx_comm_abort(id, "the test ends") : cgx_comm_close(id)) == CGX_OK, "%s",
            cgx_last_error());
      const cgx_status_t status = cgx_comm_check(id, /*finish=*/0);
      if (rank == 0) {
        CHECK(late.all_nan(), "results of a late call");
        CHECK(status == CGX_TIMEOUT || status == CGX_PEER_FAILED, "%d", status);
      } else {
        CHECK(status == CGX_CLOSED, "%d", status);
      }
    });
  }
}

// The closed communicator's devices did not take part in the failure, or are not connected yet.
void devices_of_a_closed_communicator_report_why() {
  for (const std::string type : {"SHM", "MPI"})
    for (const bool connected : {false, true}) {
      const Job job(2, type, 60);
      job.run([&](int rank) {
        FakeQueue stream(rank);
        Communicator& communicator = *job.communicators[rank];
        Rank call({}, rank, job.size()), lonely({}, rank, job.size());
        if (connected) call.enqueue(communicator, *job.devices[rank], stream);
        if (connected) communicator.check_devices(true);
        if (rank == 1) return;
        lonely.call.timeout_s = 0.3;
        error_of([&] { lonely.run(communicator); }, CGX_TIMEOUT);
        const std::string text =
            error_of([&] { call.enqueue(communicator, *job.devices[rank], stream); }, CGX_CLOSED);
        CHECK(contains(text, "rank 1 has not started it"), "%s", text.c_str());
      });
    }
}

// A call on the CPU fails while a call on the device waits for its stream.
void calls_that_wait_while_the_communicator_fails_are_failures() {
  const Job job(2, "MPI", 60);
  job.run([&](int rank) {
    FakeQueue stream(rank);
    Communicator& communicator = *job.communicators[rank];
    Rank call({}, rank, job.size()), lonely({}, rank, job.size()), waiting({}, rank, job.size());
    call.enqueue(communicator, *job.devices[rank], stream);
    communicator.check_devices(true);
    if (rank == 1) return;
    lonely.call.timeout_s = 0.3;
    std::function<void()> fail = [&] { error_of([&] { lonely.run(communicator); }, CGX_TIMEOUT); };
    stream.call([](void* context) { (*static_cast<std::function<void()>*>(context))(); }, &fail);
    waiting.enqueue(communicator, *job.devices[rank], stream);
    stream.synchronize();
    CHECK(waiting.all_nan(), "results of a call whose communicator is closed");
    error_of([&] { communicator.check_devices(true); }, CGX_PEER_FAILED);
  });
}

void mismatches_are_described() {
  for (const std::string type : {"SHM", "MPI"})
    for (const Disagreement& each : kDisagreements) {
      const Job job(2, type, 60);
      job.run([&](int rank) {
        FakeQueue stream(rank);
        Rank call({}, rank, job.size(), "mine");
        if (rank == 1) each.change(&call);
        call.enqueue(*job.communicators[rank], *job.devices[rank], stream);
        stream.synchronize();
        CHECK(call.all_nan(), "rank %d", rank);
        const std::string text =
            error_of([&] { job.communicators[rank]->check_devices(true); }, CGX_MISMATCH);
        CHECK(contains(text, each.ours), "%s", text.c_str());
      });
    }
}

void more_rounds_than_a_peer_is_an_immediate_mismatch() {
  const Job job(2, "MPI", 60);
  job.run([&](int rank) {
    FakeQueue stream(rank);
    Case one;
    one.numels = {rank == 0 ? 1000 : 20'000'000};  // one round on rank 0, ten on rank 1
    Rank call(one, rank, job.size());
    call.enqueue(*job.communicators[rank], *job.devices[rank], stream);
    stream.synchronize();
    const std::string text =
        error_of([&] { job.communicators[rank]->check_devices(true); }, CGX_MISMATCH);
    CHECK(contains(text, "numel"), "%s", text.c_str());
    Rank cpu({}, rank, job.size());
    cpu.run(*job.communicators[rank]);  // the communicator still works on CPUs
  });
}

// Ranks compare the sizes of blocks before they enqueue anything, so the communicator stays usable.
void block_sizes_that_differ_are_an_error_on_all_ranks() {
  for (const std::string type : {"SHM", "MPI"}) {
    const Job job(3, type, 60);
    Case one;
    one.verb = CGX_ALL_TO_ALL;
    one.splits = true;
    job.run([&](int rank) {
      FakeQueue stream(rank);
      Communicator& communicator = *job.communicators[rank];
      Rank good(one, rank, job.size()), bad(one, rank, job.size());
      if (rank == 2) bad.received_[0] -= 1;
      const std::string text =
          error_of([&] { bad.enqueue(communicator, *job.devices[rank], stream); }, CGX_MISMATCH);
      const std::string says = join("rank 0 sends ", Rank(one, 0, job.size()).sent_[2],
                                    " elements to rank 2, which expects");
      CHECK(contains(text, says), "%s", text.c_str());
      good.enqueue(communicator, *job.devices[rank], stream);
      communicator.check_devices(true);
      if (rank == 2) {
        good.call.device = CGX_CUDA;
        communicator.refuse(good.call, *job.devices[rank], "it has no blocks");
      } else {
        const std::string why = error_of(
            [&] { good.enqueue(communicator, *job.devices[rank], stream); }, CGX_PEER_FAILED);
        CHECK(contains(why, "rank 2: it takes no part: it has no blocks"), "%s", why.c_str());
      }
      good.enqueue(communicator, *job.devices[rank], stream);
      communicator.check_devices(true);
      job.devices[rank]->is_recording = true;
      error_of([&] { good.enqueue(communicator, *job.devices[rank], stream); }, CGX_UNSUPPORTED);
      job.devices[rank]->is_recording = false;
      if (rank == 1) return;
      Rank lonely(one, rank, job.size());
      lonely.call.timeout_s = 0.3;
      try {
        lonely.enqueue(communicator, *job.devices[rank], stream);
        CHECK(false, "rank %d did not notice that rank 1 is missing", rank);
      } catch (const Error& error) {
        const bool expected = error.status() == CGX_TIMEOUT || error.status() == CGX_PEER_FAILED;
        CHECK(expected && contains(error.what(), "rank 1"), "%s", error.what());
      }
    });
  }
}

void devices_without_peer_access_are_staged() {
  const Job job(3, "AUTO");
  job.devices[1]->reaches_peers = false;
  int64_t compared = 0;
  compare(job, {}, &compared);
  for (const auto& communicator : job.communicators)
    CHECK(std::string(communicator->wire_name()) == "staged", "%s", communicator->wire_name());

  const Job strict(2, "SHM");
  strict.devices[1]->reaches_peers = false;
  strict.run([&](int rank) {
    FakeQueue stream(rank);
    Rank call({}, rank, 2);
    const std::string text =
        error_of([&] { call.enqueue(*strict.communicators[rank], *strict.devices[rank], stream); },
                 CGX_SYSTEM);
    CHECK(contains(text, "rank 1") && contains(text, "does not reach"), "%s", text.c_str());
  });
}

void lack_of_device_memory_is_an_error_on_all_ranks() {
  const Job job(2, "AUTO");
  job.devices[0]->memory_left = 1000;
  job.run([&](int rank) {
    FakeQueue stream(rank);
    Rank call({}, rank, 2);
    const std::string text = error_of(
        [&] { call.enqueue(*job.communicators[rank], *job.devices[rank], stream); }, CGX_SYSTEM);
    CHECK(contains(text, "rank 0") && contains(text, "wanted"), "%s", text.c_str());
  });
}

void unsupported_calls() {
  const Job job(2, "MPI");
  job.run([&](int rank) {
    FakeQueue stream(rank);
    Communicator& communicator = *job.communicators[rank];
    Case ring;
    ring.algorithm = CGX_RING;
    Case wide;
    wide.numels = {4 << 20};
    wide.bucket_size = 4 << 20;
    const auto refused = [&](const Case& one, const char* part) {
      Rank call(one, rank, 2);
      const std::string text = error_of(
          [&] { call.enqueue(communicator, *job.devices[rank], stream); }, CGX_UNSUPPORTED);
      CHECK(contains(text, part), "%s", text.c_str());
    };
    refused(ring, "one_shot and sra");
    Case nothing;
    nothing.verb = CGX_ALL_TO_ALL;
    nothing.splits = true;
    nothing.numels = {0};
    Rank message(nothing, rank, 2);
    const int32_t peer = 1 - rank;
    message.call.peer = &peer;
    const std::string why = error_of(
        [&] { message.enqueue(communicator, *job.devices[rank], stream); }, CGX_UNSUPPORTED);
    CHECK(contains(why, "with a peer is not supported on GPUs"), "%s", why.c_str());
    Case sparse;
    sparse.compressor = CGX_TOPK;
    sparse.density = 300'000'000;
    refused(sparse, "at most 0.25");
    sparse.density = 0;
    sparse.value_bits = 8;
    refused(sparse, "value_bits=8 is not supported on GPUs");
    sparse.compressor = CGX_RANDK;
    sparse.value_bits = 0;
    sparse.seeds_on_device = true;
    refused(sparse, "pass seeds in host memory");
    Case rotated;
    rotated.rotation = 64;
    rotated.bucket_size = 8193;
    rotated.numels = {20'000};
    refused(rotated, "8192");
    refused(wide, "bucket_size");
    job.devices[rank]->is_recording = true;
    refused({}, "capturing");
    job.devices[rank]->is_recording = false;

    Rank call({}, rank, 2);
    error_of([&] { call.call.device = CGX_CUDA, communicator.run(call.call); },
             CGX_INVALID_ARGUMENT);
    FakeDevice other(9);
    const std::string text =
        error_of([&] { call.enqueue(communicator, other, stream); }, CGX_INVALID_ARGUMENT);
    CHECK(contains(text, "fake:9"), "%s", text.c_str());
  });
}

}  // namespace
}  // namespace cgx

int main() {
  using namespace cgx;
  addresses_of_empty_segments_are_not_checked();
  the_first_call_has_its_own_deadline();
  a_missing_rank_is_a_timeout();
  a_late_rank_is_named_after_the_communicator_is_closed();
  failures_are_known_after_the_communicator_is_closed();
  devices_of_a_closed_communicator_report_why();
  calls_that_wait_while_the_communicator_fails_are_failures();
  mismatches_are_described();
  more_rounds_than_a_peer_is_an_immediate_mismatch();
  block_sizes_that_differ_are_an_error_on_all_ranks();
  devices_without_peer_access_are_staged();
  lack_of_device_memory_is_an_error_on_all_ranks();
  unsupported_calls();
  std::puts("device_failures_test: passed");
}
