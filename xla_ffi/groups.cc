#include "groups.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "cgx/call.h"
#include "cgx/completion_pool.h"
#include "recent_runs.h"

namespace cgx::xla {
namespace {

template <typename T>
std::string Join(const std::vector<T>& values) {
  std::string text;
  for (T value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
  return text;
}

constexpr const char* kCuda = "jax-cuda";

// Returns the group of that name, created from `arguments` at its first use. Groups are never
// destroyed: threads may use them until the process has ended.
template <typename T, typename... Arguments>
T& FindGroup(const std::string& name, const Arguments&... arguments) {
  static auto* mutex = new std::mutex;
  static auto* groups = new std::map<std::string, T>;
  std::lock_guard lock(*mutex);
  return groups->try_emplace(name, arguments...).first->second;
}

// ---- devices of one process ---------------------------------------------------------------------

struct LocalGroup {
  std::mutex mutex;
  std::vector<int32_t> comms;  // by rank; empty before the first use
  bool abandoned = false;      // the communicators must be made again
  int64_t generation = 0;
  RecentRuns<std::vector<int32_t>> runs;  // the communicators that a run started with
};

std::string NameOf(const std::string& kind, const std::vector<int64_t>& members) {
  return kind + ":" + Join(members);
}

bool IsClosed(int32_t comm) {
  auto info = make<cgx_comm_info_t>();
  return cgx_comm_info(comm, &info) != CGX_OK || info.closed != 0;
}

// ---- processes ----------------------------------------------------------------------------------

std::atomic<int32_t> world_of_processes{-1};  // -1: cgx_init's

class ProcessGroup {
 public:
  ProcessGroup(std::string name, std::vector<int32_t> processes)
      : name_(std::move(name)), processes_(std::move(processes)) {}

  void Use(UseCommunicator use) {
    std::lock_guard lock(mutex_);
    if (outcome_) {
      use(outcome_->comm, outcome_->status, outcome_->message);
      return;
    }
    waiting_.push_back(std::move(use));
    if (waiting_.size() == 1) CompletionPool::get().run([this] { Create(); });
  }

 private:
  struct Outcome {
    int32_t comm;
    cgx_status_t status;
    std::string message;
  };

  void Create() {
    Outcome outcome{-1, CGX_OK, ""};
    int32_t world = world_of_processes;
    if (world < 0) outcome.status = cgx_init(&world);
    if (outcome.status == CGX_OK) {
      outcome.status =
          cgx_comm_group(world, processes_.data(), static_cast<int32_t>(processes_.size()),
                         name_.c_str(), &outcome.comm);
    }
    if (outcome.status != CGX_OK) {
      outcome.message = std::string("cannot create a communicator for the processes ") +
                        Join(processes_) + " (this is not retried): " + cgx_last_error();
    }
    // Holding the mutex keeps the order: later calls of Use() start after the waiting ones.
    std::lock_guard lock(mutex_);
    outcome_ = std::move(outcome);
    for (UseCommunicator& use : waiting_) use(outcome_->comm, outcome_->status, outcome_->message);
    waiting_.clear();
  }

  const std::string name_;
  const std::vector<int32_t> processes_;
  std::mutex mutex_;
  std::optional<Outcome> outcome_;
  std::vector<UseCommunicator> waiting_;
};

}  // namespace

void SetWorld(int32_t comm) { world_of_processes = comm; }

int32_t LocalCommunicator(const std::string& kind, const std::vector<int64_t>& members,
                          int64_t rank, int64_t run, double timeout_s) {
  const std::string name = NameOf(kind, members);
  LocalGroup& group = FindGroup<LocalGroup>(name);
  std::lock_guard lock(group.mutex);
  if (std::vector<int32_t>* comms = group.runs.Find(run)) return comms->at(rank);
  if (group.comms.empty() || group.abandoned ||
      std::any_of(group.comms.begin(), group.comms.end(), IsClosed)) {
    std::vector<int32_t> old = std::move(group.comms);
    group.comms.clear();
    group.abandoned = false;
    // Closing waits until peers have read their messages, so it must not happen here.
    if (!old.empty()) {
      CompletionPool::get().run([old] {
        for (int32_t comm : old) cgx_comm_close(comm);
      });
    }
    std::vector<int32_t> comms(members.size());
    check(cgx_comm_create_local(static_cast<int32_t>(members.size()),
                                (name + ":" + std::to_string(group.generation++)).c_str(),
                                timeout_s, comms.data()));
    group.comms = std::move(comms);
  }
  return group.runs.Add(run, group.comms)->at(rank);
}

void WithProcessCommunicator(const std::vector<int32_t>& processes, UseCommunicator use) {
  const std::string name = "jax:" + Join(processes);
  FindGroup<ProcessGroup>(name, name, processes).Use(std::move(use));
}

// ---- GPUs ---------------------------------------------------------------------------------------

int32_t CudaCommunicator(const CudaGroup& group, int64_t rank, int64_t run) {
  if (group.processes.empty())
    return LocalCommunicator(kCuda, group.devices, rank, run, /*timeout_s=*/0);
  auto made = std::make_shared<std::promise<int32_t>>();
  const std::string name = NameOf(kCuda, group.devices);
  FindGroup<ProcessGroup>(name, name, group.processes)
      .Use([made](int32_t comm, cgx_status_t status, const std::string& message) {
        if (status == CGX_OK) return made->set_value(comm);
        made->set_exception(std::make_exception_ptr(StatusError(status, message)));
      });
  return made->get_future().get();
}

void Abandon(const CudaGroup& group, int64_t rank, int64_t run) {
  if (!group.processes.empty()) return;
  LocalGroup& local = FindGroup<LocalGroup>(NameOf(kCuda, group.devices));
  std::lock_guard lock(local.mutex);
  const std::vector<int32_t>* comms = local.runs.Find(run);
  if (comms == nullptr || *comms != local.comms) return;
  local.abandoned = true;
  CompletionPool::get().run([comm = comms->at(rank)] { cgx_comm_close(comm); });
}

void Refuse(const std::vector<int32_t>& processes, const std::string& name, cgx_status_t refusal,
            const std::string& text) {
  WithProcessCommunicator(
      processes, [=](int32_t comm, cgx_status_t status, const std::string& /*message*/) {
        if (status != CGX_OK) return;  // without a communicator no process waits
        CallBuilder call(name);
        call.fields.comm = comm;
        cgx_refuse(&call.get(), refusal, text.c_str());  // a closed one has notified them already
      });
}

}  // namespace cgx::xla
