// The functions of cgx.h, except for the descriptions of section 2 (describe.cc) and sections 4
// (configs: config.cc), 5 (carried.cc) and 6 (codec.cc). Each converts its arguments and calls the
// layer below; api.h converts exceptions.
#include "cgx/cgx.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>

#include "algorithm/layout.h"
#include "api/api.h"
#include "base/checks.h"
#include "base/env.h"
#include "base/status.h"
#include "connect.h"
#include "device/addresses.h"
#include "kernel/kernels.h"
#include "registry.h"
#include "traffic.h"
#include "transport/mpi.h"

namespace {

using namespace cgx;

std::mutex init_mutex;
// A rank was lost or never came, so MPI_Finalize may wait for it.
std::atomic<bool> job_failed{false};

// Runs before anything that a forked child must not use. Reports invalid environment variables
// here, on the rank that has them, and not in the first collective. kernels() comes first, so that
// it is initialized before forks.
void prepare_process() {
  kernels();
  env_threads();
  env_ranks_on_host();
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });
  (void)registered;
}

Communicator::Seconds timeout_or_default(double seconds) {
  return Communicator::Seconds(
      std::min(seconds > 0 ? seconds : env_timeout_seconds(), kLongestTimeout));
}

Communicator::Seconds time_limit(double seconds) {
  require(seconds >= 0 && seconds <= kLongestTimeout, CGX_INVALID_ARGUMENT, "seconds is ", seconds,
          "; accepted: 0 to ", kLongestTimeout);
  return Communicator::Seconds(seconds);
}

std::string transport_or_default(const char* transport) {
  if (!transport) return env_transport();
  const std::string text = transport;
  std::string accepted;
  for (const std::string& type : communicator_types()) {
    if (text == type) return text;
    accepted += (accepted.empty() ? "" : ", ") + type;
  }
  fail(CGX_INVALID_ARGUMENT, "transport is '", text, "'; accepted: ", accepted);
}

CommunicatorRef make_world() {
  const auto timeout = timeout_or_default(0);
  const std::string type = env_transport();
  if (!mpi_wanted()) return connect(Registry::kWorldName, 0, 0, 1, {}, type, timeout);
  Mpi& mpi = open_mpi();
  const MpiWorld place = mpi.start(timeout);
  const Allgather allgather = [&](const Bytes& mine) {
    const Bytes all = mpi.allgather(mine, timeout);
    std::vector<Bytes> blobs;
    for (int rank = 0; rank < place.size; ++rank)
      blobs.emplace_back(all.begin() + rank * mine.size(), all.begin() + (rank + 1) * mine.size());
    return blobs;
  };
  return connect(Registry::kWorldName, place.rank, place.rank, place.size, allgather, type,
                 timeout);
}

// Lets `how` close a communicator that was removed from the registry.
void end(int32_t id, const CommunicatorRef& communicator,
         const std::function<void(Communicator&)>& how) {
  struct Closed {
    ~Closed() {
      if (communicator->failed()) job_failed = true;
      Registry::instance().closed(id, communicator);
    }
    int32_t id;
    const CommunicatorRef& communicator;
  };
  const Closed closed{id, communicator};
  how(*communicator);
}

void close(int32_t id, const CommunicatorRef& removed) {
  end(id, removed, [](Communicator& communicator) { communicator.close(); });
}

int64_t nanoseconds(Clock::duration time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

}  // namespace

struct cgx_request_t {
  CommunicatorRef communicator;
  std::shared_ptr<Collective> collective;
};

const char* cgx_last_error(void) { return last_error.c_str(); }
int32_t cgx_last_error_field(void) { return last_error_field; }
const char* cgx_version(void) { return CGX_VERSION; }

cgx_status_t cgx_init(int32_t* world) {
  return guarded([&] {
    prepare_process();
    const std::lock_guard lock(init_mutex);
    if (!Registry::instance().find_world()) {
      const bool failed = job_failed.exchange(true);  // until make_world returns
      Registry::instance().add(make_world());
      job_failed = failed;
    }
    if (world) *world = Registry::kWorld;
  });
}

cgx_status_t cgx_finish(void) {
  if (forked) return CGX_OK;
  return guarded([] {
    for (const auto& communicator : Registry::instance().all())
      communicator->finish(communicator->timeout);
  });
}

cgx_status_t cgx_finalize(void) {
  if (forked) return CGX_OK;
  return guarded([] {
    const std::lock_guard lock(init_mutex);
    auto& registry = Registry::instance();
    std::exception_ptr first;
    for (const auto& [id, communicator] : registry.remove_all()) {
      try {
        close(id, communicator);
      } catch (const std::exception&) {
        if (!first) first = std::current_exception();
      }
    }
    const auto timeout = timeout_or_default(0);
    // Other threads may still close communicators, and use MPI.
    const bool all_closed = registry.wait_closed(timeout);
    if (Mpi* const mpi = opened_mpi()) mpi->finish(all_closed && !job_failed && !first, timeout);
    if (first) std::rethrow_exception(first);
  });
}

cgx_status_t cgx_comm_create(const cgx_bootstrap_t* bootstrap, int32_t* comm) {
  return guarded([&] {
    prepare_process();
    check_struct(bootstrap, "cgx_bootstrap_t");
    const std::string name = bootstrap->name ? bootstrap->name : "";
    const int size = in_range<int>("size", bootstrap->size, 1, INT32_MAX, "1 or more");
    in_range("rank", bootstrap->rank, 0, size - 1, "0 to size - 1");
    const int noise_rank = bootstrap->noise_rank ? *bootstrap->noise_rank : bootstrap->rank;
    require(noise_rank >= 0, CGX_INVALID_ARGUMENT, "noise_rank is ", noise_rank,
            "; accepted: 0 or more");
    const Allgather allgather = [&](const Bytes& mine) {
      // Detects a callback that returns 0 without doing anything: this rank's own bytes stay
      // inverted.
      Bytes all(mine.size() * size);
      const auto own = all.begin() + bootstrap->rank * mine.size();
      std::transform(mine.begin(), mine.end(), own, std::bit_not());
      require(bootstrap->allgather(bootstrap->context, mine.data(), mine.size(), all.data()) == 0,
              CGX_SYSTEM, "the bootstrap's allgather failed: it must return 0");
      require(std::equal(mine.begin(), mine.end(), own), CGX_SYSTEM,
              "the bootstrap's allgather did not return this rank's own bytes");
      std::vector<Bytes> blobs;
      for (int rank = 0; rank < size; ++rank)
        blobs.emplace_back(all.begin() + rank * mine.size(),
                           all.begin() + (rank + 1) * mine.size());
      return blobs;
    };
    require(bootstrap->elastic == 0 || bootstrap->elastic == 1, CGX_INVALID_ARGUMENT, "elastic is ",
            bootstrap->elastic, "; accepted: 0 or 1");
    *comm = Registry::instance().add(connect(
        name, bootstrap->rank, noise_rank, size, allgather,
        transport_or_default(bootstrap->transport), timeout_or_default(bootstrap->timeout_s),
        /*elastic=*/bootstrap->elastic != 0,
        Communicator::Seconds(std::clamp(bootstrap->connect_timeout_s, 0.0, kLongestTimeout))));
  });
}

cgx_status_t cgx_comm_create_local(int32_t size, const char* name, double timeout_s,
                                   int32_t* comms) {
  return guarded([&] {
    prepare_process();
    require(size >= 1, CGX_INVALID_ARGUMENT, "size is ", size, "; accepted: 1 or more");
    for (int32_t rank = 0; rank < size; ++rank)
      Registry::instance().require_free(join(name ? name : "", "/", rank));
    int32_t* next = comms;
    for (auto& communicator :
         connect_local(name ? name : "", std::vector<int>(size, 0), timeout_or_default(timeout_s)))
      *next++ = Registry::instance().add(std::move(communicator));
  });
}

cgx_status_t cgx_comm_split(int32_t comm, int32_t color, int32_t key, const char* name,
                            int32_t* out) {
  return guarded([&] {
    const auto parent = Registry::instance().get(comm);
    auto child = split(*parent, color, key, name ? name : "");
    *out = child ? Registry::instance().add(std::move(child)) : -1;
  });
}

cgx_status_t cgx_comm_group(int32_t comm, const int32_t* ranks, int32_t num_ranks, const char* name,
                            int32_t* out) {
  return guarded([&] {
    const auto parent = Registry::instance().get(comm);
    *out = Registry::instance().add(group(*parent, {ranks, ranks + num_ranks}, name ? name : ""));
  });
}

cgx_status_t cgx_comm_find(const char* name, int32_t* comm) {
  return guarded([&] { *comm = Registry::instance().find(name ? name : ""); });
}

cgx_status_t cgx_comm_next(int32_t after, int32_t* comm) {
  return guarded([&] { *comm = Registry::instance().next(after); });
}

cgx_status_t cgx_comm_info(int32_t comm, cgx_comm_info_t* info) {
  return guarded([&] {
    check_struct(info, "cgx_comm_info_t", offsetof(cgx_comm_info_t, bytes_in));
    const auto communicator = Registry::instance().get(comm);
    thread_local std::string name;
    name = communicator->name;
    const Totals totals = communicator->totals();
    const cgx_comm_info_t all = {info->struct_size,
                                 communicator->rank,
                                 communicator->size,
                                 communicator->closed(),
                                 name.c_str(),
                                 communicator->transport_name(),
                                 communicator->bytes_sent(),
                                 totals.collectives,
                                 totals.bytes_in,
                                 nanoseconds(totals.agree),
                                 nanoseconds(totals.move),
                                 nanoseconds(totals.compute),
                                 totals.bytes_plain,
                                 communicator->wire_name(),
                                 communicator->topology->host_of(communicator->rank),
                                 communicator->topology->hosts(),
                                 communicator->rejected_connections()};
    std::memcpy(info, &all, info->struct_size);
  });
}

cgx_status_t cgx_traffic(cgx_traffic_t* traffic) {
  return guarded([&] {
    check_struct(traffic, "cgx_traffic_t");
    *traffic = {traffic->struct_size, 0, 0, 0, 0};
    Registry::instance().add_traffic(traffic);
    Traffic::carried().add_to(traffic);
  });
}

cgx_status_t cgx_comm_find_lost(int32_t comm, double seconds) {
  return guarded([&] { Registry::instance().get(comm)->require_peers(time_limit(seconds)); });
}

cgx_status_t cgx_comm_close(int32_t comm) {
  return guarded([&] { close(comm, Registry::instance().remove(comm)); });
}

cgx_status_t cgx_comm_abort(int32_t comm, const char* reason) {
  return guarded([&] {
    require(reason != nullptr, CGX_INVALID_ARGUMENT, "reason is NULL: pass a text");
    end(comm, Registry::instance().remove(comm),
        [&](Communicator& communicator) { communicator.abort(reason); });
  });
}

cgx_status_t cgx_start(const cgx_collective_t* collective, cgx_callback_t callback, void* context,
                       cgx_request_t** request) {
  return guarded([&] {
    check_struct(collective, "cgx_collective_t");
    require((callback != nullptr) != (request != nullptr), CGX_INVALID_ARGUMENT,
            "pass either a callback or an address for the request");
    // Allocate first: nothing may fail after the start, or the caller would free its buffers too
    // early.
    auto owned = std::make_unique<cgx_request_t>();
    owned->communicator = Registry::instance().get(collective->comm);
    owned->collective = owned->communicator->start(*collective, callback, context);
    if (request) *request = owned.release();
  });
}

cgx_status_t cgx_notify(cgx_request_t* request, cgx_callback_t callback, void* context) {
  return guarded([&] {
    require(callback != nullptr, CGX_INVALID_ARGUMENT, "callback is a null pointer");
    const cgx_request_t kept = *request;  // the callback may cause the request to be freed
    kept.communicator->notify(*kept.collective, callback, context);
  });
}

cgx_status_t cgx_refuse(const cgx_collective_t* collective, cgx_status_t status,
                        const char* message) {
  return guarded([&] {
    check_struct(collective, "cgx_collective_t");
    in_range("status", status, CGX_OK + 1, CGX_INTERNAL, "a cgx_status_t that is not CGX_OK");
    require(message, CGX_INVALID_ARGUMENT, "a refusal needs a message: pass a text");
    const auto communicator = Registry::instance().get(collective->comm);
    if (collective->device == CGX_CPU) return communicator->refuse(*collective, status, message);
    communicator->refuse(*collective, device::device_of(device::first_buffer(*collective)),
                         message);
  });
}

cgx_status_t cgx_run(const cgx_collective_t* collective) {
  return guarded([&] {
    check_struct(collective, "cgx_collective_t");
    Registry::instance().get(collective->comm)->run(*collective);
  });
}

cgx_status_t cgx_enqueue(const cgx_collective_t* collective) {
  return guarded([&] {
    check_struct(collective, "cgx_collective_t");
    const auto communicator = Registry::instance().get(collective->comm);
    communicator->enqueue(*collective, device::device_of(device::first_buffer(*collective)));
  });
}

cgx_status_t cgx_comm_check(int32_t comm, int32_t finish) {
  return guarded([&] { Registry::instance().get_to_check(comm)->check_devices(finish != 0); });
}

cgx_status_t cgx_stream_recording(void* stream, int32_t* recording) {
  return guarded([&] { *recording = device::device_of(nullptr).recording(stream); });
}

cgx_status_t cgx_test(cgx_request_t* request, int32_t* done) {
  return guarded([&] { *done = request->collective->done; });
}

cgx_status_t cgx_wait(cgx_request_t* request) {
  return guarded([&] {
    const std::unique_ptr<cgx_request_t> owned(request);
    owned->communicator->wait(*owned->collective);
  });
}

cgx_status_t cgx_wait_for(cgx_request_t* request, double seconds, int32_t* done) {
  return guarded([&] {
    *done = request->communicator->wait(*request->collective, time_limit(seconds));
    if (*done)
      request->communicator->wait(*request->collective);  // throws the collective's
                                                          // failure
  });
}

cgx_status_t cgx_run_for(const cgx_collective_t* collective, double seconds,
                         cgx_request_t** request) {
  return guarded([&] {
    check_struct(collective, "cgx_collective_t");
    const auto limit = time_limit(seconds);
    *request = nullptr;
    auto owned = std::make_unique<cgx_request_t>();
    owned->communicator = Registry::instance().get(collective->comm);
    owned->collective = owned->communicator->run(*collective, limit);
    if (owned->collective) *request = owned.release();
  });
}

cgx_status_t cgx_plan(const cgx_collective_t* collective, cgx_plan_t* plan) {
  return guarded([&] {
    check_struct(collective, "cgx_collective_t");
    check_struct(plan, "cgx_plan_t");
    const auto communicator = Registry::instance().get(collective->comm);
    const Plan made = communicator->plan(*collective);
    Plan exact = made;
    const auto uncompress = [](std::vector<Segment>& segments) {
      for (Segment& segment : segments)
        for (CodecSettings& codec : segment.codecs.each) codec.bits = kExactBits;
    };
    uncompress(exact.segments);
    std::for_each(exact.sends.begin(), exact.sends.end(), uncompress);
    std::for_each(exact.receives.begin(), exact.receives.end(), uncompress);
    plan->algorithm = made.algorithm;
    plan->payload_bytes = payload_bytes(made);
    plan->exact_bytes = payload_bytes(exact);
  });
}
