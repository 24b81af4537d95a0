// The wire `mpi` between processes, each with a device made of a thread, whose memory any MPI
// reaches. Started under mpirun by tests/core/test_mpi_fabric.py; the argument is one of:
//
//   cases    as on CPUs, to the bit: all ranks, a few of them, several communicators at once; and
//            where the wire is not for these ranks
//   tiny     a few of them, for many ranks
//   late     messages that are never taken; the last rank's device comes too late, and it stays
//            when the others leave
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

// Seconds: a deadline that is to pass, late enough for busy machines.
constexpr double kSoon = 1.5;

CommunicatorRef world() { return Registry::instance().get(Registry::kWorld); }

CommunicatorRef group_of(const std::vector<int>& ranks, const std::string& name) {
  return group(*world(), ranks, name);
}

std::vector<int> everyone() {
  std::vector<int> ranks;
  for (int rank = 0; rank < world()->size; ++rank) ranks.push_back(rank);
  return ranks;
}

std::vector<Bytes> exchange(const std::string& what, const Bytes& mine) {
  return world()->exchange(everyone(), what, mine, world()->timeout);
}

bool is_last() { return world()->rank == world()->size - 1; }

// Of all ranks, on CPUs.
void meet() { Rank({}, world()->rank, world()->size).run(*world()); }

FakeDevice& device() {
  static FakeDevice& only = *[] {
    auto* made = new FakeDevice(world()->rank);
    made->is_reached_by_mpi = true;
    made->reaches_peers = false;  // another process's memory is none of this one's
    return made;
  }();
  return only;
}

void require_wire(const Communicator& communicator, const std::string& expected) {
  CHECK(communicator.wire_name() == expected, "'%s' has the wire %s", communicator.name.c_str(),
        communicator.wire_name());
}

// A call, in a thread since it waits for its peers. Its device comes to it when it is opened.
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
  // What the call has thrown, once all has ended.
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

// A message to each peer is longer than a slot, 8 MiB between few ranks.
Case several_rounds() {
  Case one;
  one.numels = {world()->size * (int64_t{9} << 18), 17};
  one.bits = 32;
  return one;
}

// Calls on communicators in turns, none of which is waited for.
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
    CHECK(cpu[i]->result() == gpu[i]->result(), "call %zu of many differs", i);
}

// A rank comes to one communicator's exchange first, its neighbour to the other's.
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
    CHECK(cpu[i]->result() == gpu[i]->call.result(), "collective %d met another", i);
  }
}

// All ranks, backwards, and all but the first: a rank's number is another one in each.
std::vector<CommunicatorRef> overlapping() {
  const std::vector<int> all = everyone();
  const std::vector<int> backwards(all.rbegin(), all.rend()), others(all.begin() + 1, all.end());
  std::vector<CommunicatorRef> made = {world(), group_of(backwards, "backwards")};
  if (world()->rank > 0 && others.size() > 1) made.push_back(group_of(others, "others"));
  return made;
}

void close_all(const std::vector<CommunicatorRef>& communicators) {
  for (const auto& communicator : communicators)
    if (communicator != world()) communicator->close();
}

// One rank's MPI does not reach its device: all take another wire.
void one_rank_is_not_reached() {
  const auto communicator = group_of(everyone(), "not reached");
  device().is_reached_by_mpi = !is_last();
  compare(*communicator, case_of(1000, CGX_ALLREDUCE, CGX_SRA));
  require_wire(*communicator, "staged");
  device().is_reached_by_mpi = true;
  communicator->close();
}

// Ranks of one process have one rank of MPI's between them.
void threads_are_not_connected_by_mpi() {
  const Job job(2, "MPI");
  for (const auto& each : job.devices) each->is_reached_by_mpi = true;
  int64_t compared = 0;
  cgx::compare(job, case_of(1000, CGX_ALLREDUCE, CGX_SRA), &compared);
  require_wire(*job.communicators[0], "staged");
}

void run_cases() {
  for (const Case& one : cases()) compare(*world(), one);
  require_wire(*world(), "mpi");
  CHECK(device().flushes > 0 && device().flushes == device().times_current,
        "what arrived is not made visible");
  if (world()->size == 2) compare(*world(), several_rounds());
  const auto communicators = overlapping();
  compare_at_once(communicators, 8);
  compare_crosswise(communicators);
  close_all(communicators);
  one_rank_is_not_reached();
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

// All ranks have agreed on a collective, and all but the last wait for its messages.
struct Stuck {
  explicit Stuck(double timeout_s) {
    compare(*world(), case_of(1000, CGX_ALLREDUCE, CGX_SRA));
    require_wire(*world(), "mpi");
    const int before = device().times_current;
    held.emplace(*world(), case_of(100'000, CGX_ALLREDUCE, CGX_SRA), "stuck", timeout_s);
    if (!is_last()) {
      held->open();
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      while (device().times_current == before) {
        CHECK(std::chrono::steady_clock::now() < deadline, "the exchange has not begun");
        std::this_thread::yield();
      }
    }
    meet();
  }
  // The call gives up, and so does every later one.
  void require_given_up(const std::function<bool(const Error&)>& expected) {
    const auto& error = held->error();
    CHECK(error, "rank %d is well", world()->rank);
    CHECK(contains(error->what(), "'stuck' (number 1): ") && expected(*error), "status %d: %s",
          error->status(), error->what());
    CHECK(held->call.all_nan(), "rank %d kept values", world()->rank);
    const std::string later = error_of([] { world()->check_devices(true); }, error->status());
    CHECK(contains(later, error->what()), "%s", later.c_str());
  }

  std::optional<Held> held;
};

// Rank 0 sends what rank 1 does not take; rank 1 waits for what the last does not send.
void memory_that_mpi_may_still_use_is_kept() {
  auto messages = open_mpi().make_messages();
  CHECK(messages->connect(exchange("addresses", messages->address())), "one job");
  constexpr size_t kBytes = 1000;
  MpiMessages::Memory memory(new std::byte[kBytes](), [](std::byte* at) { delete[] at; });
  const std::weak_ptr<std::byte> left = memory;
  const int rank = world()->rank;
  if (rank == 0) messages->send(1, std::move(memory), kBytes);
  if (rank == 1) messages->receive(world()->size - 1, std::move(memory), kBytes);
  CHECK(messages->pending() == (rank <= 1), "rank %d", rank);
  messages->abandon(Seconds(0.1));
  CHECK(!messages->pending(), "rank %d", rank);
  messages.reset();
  if (rank == 0) CHECK(!left.expired(), "MPI may read freed memory");
  if (rank == 1) CHECK(left.expired(), "a receive was not cancelled");
}

// Does not leave before them: they wait for it no longer than a moment.
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
  memory_that_mpi_may_still_use_is_kept();
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
  meet();
  if (!is_last()) return;
  // Its peers have tried to take back what they had sent: what is left of it may arrive, or never.
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
