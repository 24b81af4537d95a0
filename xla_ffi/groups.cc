#include "groups.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

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

// ---- devices of one process ---------------------------------------------------------------------

struct LocalGroup {
  std::mutex mutex;
  std::vector<int32_t> comms;  // by rank; empty before the first use
  int64_t generation = 0;
  RecentRuns<std::vector<int32_t>> runs;  // the communicators that a run began with
};

LocalGroup& FindLocalGroup(const std::vector<int64_t>& members) {
  static auto* mutex = new std::mutex;
  static auto* groups = new std::map<std::vector<int64_t>, std::unique_ptr<LocalGroup>>;
  std::lock_guard lock(*mutex);
  std::unique_ptr<LocalGroup>& group = (*groups)[members];
  if (!group) group = std::make_unique<LocalGroup>();
  return *group;
}

bool IsClosed(int32_t comm) {
  auto info = make<cgx_comm_info_t>();
  return cgx_comm_info(comm, &info) != CGX_OK || info.closed != 0;
}

// ---- processes ----------------------------------------------------------------------------------

std::atomic<int32_t> world_of_processes{-1};  // cgx_init's

class ProcessGroup {
 public:
  explicit ProcessGroup(std::vector<int32_t> processes) : processes_(std::move(processes)) {}

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
      std::string name = "jax:" + Join(processes_);
      outcome.status =
          cgx_comm_group(world, processes_.data(), static_cast<int32_t>(processes_.size()),
                         name.c_str(), &outcome.comm);
    }
    if (outcome.status != CGX_OK) {
      outcome.message = std::string("no communicator for the processes ") + Join(processes_) +
                        ", and none will be tried again: " + cgx_last_error();
    }
    // The mutex keeps the order: whoever comes now is started after those who waited.
    std::lock_guard lock(mutex_);
    outcome_ = std::move(outcome);
    for (UseCommunicator& use : waiting_) use(outcome_->comm, outcome_->status, outcome_->message);
    waiting_.clear();
  }

  const std::vector<int32_t> processes_;
  std::mutex mutex_;
  std::optional<Outcome> outcome_;
  std::vector<UseCommunicator> waiting_;
};

}  // namespace

void SetWorld(int32_t comm) { world_of_processes = comm; }

int32_t LocalCommunicator(const std::vector<int64_t>& members, int64_t rank, int64_t run,
                          double timeout_s) {
  LocalGroup& group = FindLocalGroup(members);
  std::lock_guard lock(group.mutex);
  if (std::vector<int32_t>* comms = group.runs.Find(run)) return comms->at(rank);
  if (group.comms.empty() || std::any_of(group.comms.begin(), group.comms.end(), IsClosed)) {
    std::vector<int32_t> old = std::move(group.comms);
    group.comms.clear();
    // Closing waits until peers have read their messages, so it must not happen here.
    if (!old.empty()) {
      CompletionPool::get().run([old] {
        for (int32_t comm : old) cgx_comm_close(comm);
      });
    }
    std::vector<int32_t> comms(members.size());
    std::string name = "jax-local:" + Join(members) + ":" + std::to_string(group.generation++);
    check(cgx_comm_create_local(static_cast<int32_t>(members.size()), name.c_str(), timeout_s,
                                comms.data()));
    group.comms = std::move(comms);
  }
  return group.runs.Add(run, group.comms)->at(rank);
}

void WithProcessCommunicator(const std::vector<int32_t>& processes, UseCommunicator use) {
  static auto* mutex = new std::mutex;
  static auto* groups = new std::map<std::vector<int32_t>, std::unique_ptr<ProcessGroup>>;
  ProcessGroup* group;
  {
    std::lock_guard lock(*mutex);
    std::unique_ptr<ProcessGroup>& entry = (*groups)[processes];
    if (!entry) entry = std::make_unique<ProcessGroup>(processes);
    group = entry.get();
  }
  group->Use(std::move(use));
}

void Refuse(const std::vector<int32_t>& processes, const std::string& name, cgx_status_t refusal,
            const std::string& text) {
  WithProcessCommunicator(
      processes, [=](int32_t comm, cgx_status_t status, const std::string& /*message*/) {
        if (status != CGX_OK) return;  // without a communicator nobody waits
        auto collective = make<cgx_collective_t>();
        collective.comm = comm;
        collective.name = name.c_str();
        collective.occurrence = -1;
        cgx_refuse(&collective, refusal, text.c_str());  // a closed one has told them already
      });
}

}  // namespace cgx::xla
