// The wire `mpi` between processes, each with a simulated device whose memory any MPI can access.
// tests/core/test_mpi_fabric.py starts this program under mpirun. Its argument is one of:
//
//   cases    results are bitwise equal to those on CPUs: all ranks, subsets, concurrent
//            communicators, and ranks for which the wire is not available
//   tiny     a few cases, for many ranks
//   late     messages that are never received. The last rank's device starts too late, and the rank
//            stays when the others leave
//   killed   the last rank dies while its peers wait for its messages
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <optional>

#include "device_cases.h"
#include "registry.h"
#include "transport/mpi.h"

namespace cgx {
namespace {

// Seconds: a short deadline, but long enough for busy machines.
constexpr double kSoon = 1.5;

CommunicatorRef world() { return Registry::instance().get(Registry::kWorld); }

CommunicatorRef group_of(const std::vector<int>& ranks, const std::string& name) {
  return group(*world(), ranks, name);
}

std::vector<int> all_ranks() {
  std::vector<int> ranks;
  for (int rank = 0; rank < world()->size; ++rank) ranks.push_back(rank);
  return ranks;
}

std::vector<Bytes> exchange(const std::string& what, const Bytes& mine) {
  return world()->exchange(all_ranks(), what, mine, world()->timeout);
}

bool is_last() { return world()->rank == world()->size - 1; }

// An allreduce of all ranks on CPUs.
void barrier() { Rank({}, world()->rank, world()->size).run(*world()); }

FakeDevice& device() {
  static FakeDevice& only = *[] {
    auto* made = new FakeDevice(world()->rank);
    made->is_reached_by_mpi = true;
    made->reaches_peers = false;  // the address space of another process is not accessible
    return made;
  }();
  return only;
}

void require_wire(const Communicator& communicator, const std::string& expected) {
  CHECK(communicator.wire_name() == expected, "'%s' uses the wire %s", communicator.name.c_str(),
        communicator.wire_name());
}

// Makes a call in a thread, since it waits for its peers. Its stream is blocked until open().
class Held {
 public:
  Held(Communicator& communicator, const Case& one, const std::string& name = "",
       double timeout_s = 60)
      : call(one, communicator.rank, communicator.size, name) {
    call.call.timeout_s = timeout_s;
    stream_.put([this] { opened_.wait(false); });
    thread_ = std::thread([&] {
      try {
        call.enqueue(communicator, device(), stream_);
      } catch (const Error& error) {
        error_ = error;
      }
    });
  }
  ~Held() { error(); }
  void open() {
    opened_ = true;
    opened_.notify_all();
  }
  // Waits for the call, and returns the error that it threw.
  const std::optional<Error>& error() {
    if (thread_.joinable()) thread_.join();
    stream_.synchronize();
    return error_;
  }

  Rank call;

 private:
  std::atomic<bool> opened_ = false;
  FakeQueue stream_{0};
  std::optional<Error> error_;
  std::thread thread_;
};

// ---- cases ---------------------------------------------------------------------------------

void compare(Communicator& communicator, const Case& one) {
  Rank cpu(one, communicator.rank, communicator.size);
  Rank gpu(one, communicator.rank, communicator.size);
  FakeQueue stream(communicator.rank);
  cpu.run(communicator);
  gpu.enqueue(communicator, device(), stream);
  stream.synchronize();
  communicator.check_devices(false);
  CHECK(cpu.result() == gpu.result(), "rank %d of '%s' differs: %s", communicator.rank,
        communicator.name.c_str(), one.text().c_str());
}

std::vector<Case> cases() { return cases_of_lengths({0, 1, 17, 511, 512, 513, 40'000}); }

// The message to each peer is longer than a slot, which is 8 MiB for few ranks.
Case several_rounds() {
  Case one;
  one.numels = {world()->size * (int64_t{9} << 18), 17};
  one.bits = 32;
  return one;
}

// Queues calls on all communicators without waiting.
void compare_at_once(const std::vector<CommunicatorRef>& communicators, int calls) {
  FakeQueue streams[2] = {FakeQueue(0), FakeQueue(1)};
  std::vector<std::unique_ptr<Rank>> cpu, gpu;
  for (int i = 0; i < calls; ++i)
    for (const auto& communicator : communicators) {
      const auto algorithm = i % 3 ? CGX_SRA : CGX_ONE_SHOT;
      const Case one = case_of(100 + 9970 * i, CGX_ALLREDUCE, algorithm);
      cpu.push_back(std::make_unique<Rank>(one, communicator->rank, communicator->size));
      gpu.push_back(std::make_unique<Rank>(one, communicator->rank, communicator->size));
      cpu.back()->run(*communicator);
      gpu.back()->enqueue(*communicator, device(), streams[gpu.size() % 2]);
    }
  for (const auto& communicator : communicators) {
    communicator->check_devices(true);
    require_wire(*communicator, "mpi");
  }
  for (size_t i = 0; i < cpu.size(); ++i)
    CHECK(cpu[i]->result() == gpu[i]->result(), "the result of call %zu differs", i);
}

// Neighbouring ranks run the exchanges of two communicators in opposite order.
void compare_crosswise(const std::vector<CommunicatorRef>& communicators) {
  const Case one = case_of(1000, CGX_ALLREDUCE, CGX_SRA);
  std::vector<std::unique_ptr<Rank>> cpu;
  std::vector<std::unique_ptr<Held>> gpu;
  for (int i = 0; i < 2; ++i) {
    Communicator& communicator = *communicators[i];
    cpu.push_back(std::make_unique<Rank>(one, communicator.rank, communicator.size));
    cpu[i]->run(communicator);
    gpu.push_back(std::make_unique<Held>(communicator, one));
  }
  for (const int i : {world()->rank % 2, 1 - world()->rank % 2}) {
    gpu[i]->open();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  for (int i = 0; i < 2; ++i) {
    CHECK(!gpu[i]->error(), "%s", gpu[i]->error()->what());
    CHECK(cpu[i]->result() == gpu[i]->call.result(), "the result of collective %d differs", i);
  }
}

// All ranks in reverse order, and all except the first. A process has a different rank in each.
std::vector<CommunicatorRef> overlapping() {
  const std::vector<int> all = all_ranks();
  const std::vector<int> backwards(all.rbegin(), all.rend()), others(all.begin() + 1, all.end());
  std::vector<CommunicatorRef> made = {world(), group_of(backwards, "backwards")};
  if (world()->rank > 0 && others.size() > 1) made.push_back(group_of(others, "others"));
  return made;
}

void close_all(const std::vector<CommunicatorRef>& communicators) {
  for (const auto& communicator : communicators)
    if (communicator != world()) communicator->close();
}

// If MPI cannot access one rank's device, all ranks use another wire.
void one_device_without_mpi_access() {
  const auto communicator = group_of(all_ranks(), "not reached");
  device().is_reached_by_mpi = !is_last();
  compare(*communicator, case_of(1000, CGX_ALLREDUCE, CGX_SRA));
  require_wire(*communicator, "staged");
  device().is_reached_by_mpi = true;
  communicator->close();
}

// Threads of one process share a single MPI rank.
void threads_are_not_connected_by_mpi() {
  const Job job(2, "MPI");
  for (const auto& each : job.devices) each->is_reached_by_mpi = true;
  int64_t compared = 0;
  cgx::compare(job, case_of(1000, CGX_ALLREDUCE, CGX_SRA), &compared);
  require_wire(*job.communicators[0], "staged");
}

void run_cases() {
  const auto all = cases();
  for (const Case& one : all) compare(*world(), one);
  require_wire(*world(), "mpi");
  const int exchanges = device().times_current - static_cast<int>(all.size());
  CHECK(exchanges > 0 && device().flushes == exchanges, "received data is not flushed");
  if (world()->size == 2) compare(*world(), several_rounds());
  const auto communicators = overlapping();
  compare_at_once(communicators, 8);
  compare_crosswise(communicators);
  close_all(communicators);
  one_device_without_mpi_access();
  threads_are_not_connected_by_mpi();
}

void run_auto() {
  for (const Case& one : cases()) compare(*world(), one);
  require_wire(*world(), "staged");
}

void run_tiny() {
  compare(*world(), case_of(100, CGX_ALLREDUCE, CGX_ONE_SHOT));
  compare(*world(), case_of(1000, CGX_ALLREDUCE, CGX_SRA));
  const auto communicators = overlapping();
  compare_at_once(communicators, 2);
  close_all(communicators);
}

// ---- faults --------------------------------------------------------------------------------

// All ranks agree on a collective, then all except the last wait for its messages.
struct Stuck {
  explicit Stuck(double timeout_s) {
    compare(*world(), case_of(1000, CGX_ALLREDUCE, CGX_SRA));
    require_wire(*world(), "mpi");
    const int before = device().times_current;  // the call and its exchange each increase it
    held.emplace(*world(), case_of(100'000, CGX_ALLREDUCE, CGX_SRA), "stuck", timeout_s);
    if (!is_last()) {
      held->open();
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      while (device().times_current < before + 2) {
        CHECK(std::chrono::steady_clock::now() < deadline, "the exchange has not begun");
        std::this_thread::yield();
      }
    }
    barrier();
  }
  // Checks that the call failed, and that every later call fails.
  void require_given_up(const std::function<bool(const Error&)>& expected) {
    const auto& error = held->error();
    CHECK(error, "rank %d reported no failure", world()->rank);
    CHECK(contains(error->what(), "'stuck' (number 1): ") && expected(*error), "status %d: %s",
          error->status(), error->what());
    CHECK(held->call.all_nan(), "rank %d has outputs that are not NaN", world()->rank);
    const std::string later = error_of([] { world()->check_devices(true); }, error->status());
    CHECK(contains(later, error->what()), "%s", later.c_str());
  }

  std::optional<Held> held;
};

// Rank 1 does not receive the message of rank 0, and waits for a message that is never sent.
void memory_in_use_by_mpi_is_not_freed() {
  auto messages = open_mpi().make_messages();
  CHECK(messages->connect(exchange("addresses", messages->address())),
        "the ranks are not of one job");
  constexpr size_t kBytes = 1000;
  MpiMessages::Memory memory(new std::byte[kBytes](), [](std::byte* at) { delete[] at; });
  const std::weak_ptr<std::byte> watched = memory;
  const int rank = world()->rank;
  if (rank == 0) messages->send(1, std::move(memory), kBytes);
  if (rank == 1) messages->receive(world()->size - 1, std::move(memory), kBytes);
  CHECK(messages->pending() == (rank <= 1), "rank %d", rank);
  messages->abandon(Seconds(0.1));
  CHECK(!messages->pending(), "rank %d", rank);
  messages.reset();
  if (rank == 0) CHECK(!watched.expired(), "MPI may read freed memory");
  if (rank == 1) CHECK(watched.expired(), "the receive was not cancelled");
}

// Exits after the peers, which wait only briefly for this rank.
[[noreturn]] void outlive(const std::vector<Bytes>& processes) {
  for (int peer = 0; peer < world()->rank; ++peer) {
    pid_t process = 0;
    std::memcpy(&process, processes[peer].data(), sizeof(process));
    while (kill(process, 0) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  std::puts("all well");
  std::fflush(stdout);
  _exit(0);
}

void run_late() {
  memory_in_use_by_mpi_is_not_freed();
  const pid_t self = getpid();
  Bytes mine(sizeof(self));
  std::memcpy(mine.data(), &self, sizeof(self));
  const std::vector<Bytes> processes = exchange("processes", mine);
  Stuck stuck(kSoon);
  const std::string last = join("late or lost: rank ", world()->size - 1);
  if (!is_last())
    stuck.require_given_up([&](const Error& error) {
      return error.status() == CGX_TIMEOUT && std::string(error.what()).ends_with(last);
    });
  barrier();
  if (!is_last()) return;
  // The peers have cancelled their sends: these messages may arrive or not.
  stuck.held->open();
  stuck.require_given_up([](const Error& error) {
    return error.status() == CGX_TIMEOUT || error.status() == CGX_PEER_FAILED;
  });
  outlive(processes);
}

void run_killed() {
  Stuck stuck(60);
  if (is_last()) kill(getpid(), SIGKILL);
  const std::string last = join("MPI has lost rank ", world()->size - 1);
  stuck.require_given_up([&](const Error& error) {
    return error.status() == CGX_PEER_FAILED && contains(error.what(), last);
  });
}

struct Entry {
  const char* name;
  void (*run)();
};
constexpr Entry kTable[] = {{"cases", run_cases},
                            {"auto", run_auto},
                            {"tiny", run_tiny},
                            {"late", run_late},
                            {"killed", run_killed}};

}  // namespace
}  // namespace cgx

int main(int, char** arguments) {
  using namespace cgx;
  ok(cgx_set_mpi_path(LIBMPI));
  ok(cgx_init(nullptr));
  const FloatMode mode;
  for (const Entry& entry : kTable)
    if (entry.name == std::string(arguments[1])) entry.run();
  ok(cgx_finalize());
  std::puts("all well");
}
