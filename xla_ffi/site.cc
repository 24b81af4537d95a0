#include "site.h"

#include <algorithm>
#include <atomic>
#include <string_view>
#include <unordered_map>

#include "rendezvous.h"

namespace cgx::xla {
namespace {

std::atomic<int64_t> next_serial{0};

std::mutex counts_mutex;
int64_t compilations = 0;  // running; guarded by counts_mutex

// How often each call id has been instantiated for the executable that is being compiled.
std::unordered_map<std::string, int64_t>& Counts() {  // guarded by counts_mutex
  static auto* counts = new std::unordered_map<std::string, int64_t>;
  return *counts;
}

int64_t NextInstance(const std::string& call) {
  std::lock_guard lock(counts_mutex);
  return Counts()[call]++;
}

// Returns the groups with the processes of their members. `processes`: by partition, or empty.
std::vector<Group> MakeGroups(const std::vector<int64_t>& partitions, int64_t group_size,
                              const std::vector<int64_t>& processes) {
  std::vector<Group> groups;
  for (size_t first = 0; first < partitions.size(); first += group_size) {
    Group group;
    group.index = static_cast<int64_t>(groups.size());
    group.members.assign(partitions.begin() + first, partitions.begin() + first + group_size);
    for (size_t rank = 0; rank < group.members.size() && !processes.empty(); ++rank) {
      const auto process = static_cast<int32_t>(processes.at(group.members[rank]));
      const auto known = std::find(group.processes.begin(), group.processes.end(), process);
      const size_t index = known - group.processes.begin();
      if (known == group.processes.end()) {
        group.processes.push_back(process);
        group.members_of.emplace_back();
      }
      group.process_of.push_back(static_cast<int64_t>(index));
      group.place_of.push_back(static_cast<int64_t>(group.members_of[index].size()));
      group.members_of[index].push_back(static_cast<int64_t>(rank));
    }
    if (group.processes.size() == 1) group.processes.clear();
    groups.push_back(std::move(group));
  }
  return groups;
}

}  // namespace

ffi::TypeId Site::id = {};
ffi::TypeId CudaSite::id = {};

Site::Site(const ffi::Dictionary& attributes)
    : signature_(attributes),
      named_(GetAttribute<int64_t>(attributes, "named") != 0),
      serial_(next_serial++) {
  std::vector<int64_t> processes;
  if (attributes.contains("processes")) processes = GetList(attributes, "processes");
  if (attributes.contains("devices")) devices_ = GetList(attributes, "devices");
  groups_ = MakeGroups(GetList(attributes, "groups"),
                       GetAttribute<int64_t>(attributes, "group_size"), processes);
  std::string call(GetAttribute<std::string_view>(attributes, "call"));
  name_ = call + "#" + std::to_string(NextInstance(call));
}

Site::~Site() = default;

Site::Place Site::Find(int64_t partition) const {
  for (const Group& group : groups_) {
    const auto found = std::find(group.members.begin(), group.members.end(), partition);
    if (found != group.members.end()) return {&group, found - group.members.begin()};
  }
  throw StatusError(CGX_INTERNAL,
                    "partition " + std::to_string(partition) + " is in no group of the mesh axes");
}

int64_t Site::PartitionOf(int64_t device) const {
  const auto found = std::find(devices_.begin(), devices_.end(), device);
  if (found == devices_.end()) {
    throw StatusError(CGX_INVALID_ARGUMENT,
                      "the program was lowered for a mesh without device " +
                          std::to_string(device) +
                          ": lower (or export) it again, for the devices that run it");
  }
  return found - devices_.begin();
}

std::string Site::Describe(const Place& place) const {
  return signature_.function + " '" + name_ + "' on rank " + std::to_string(place.rank) + " of " +
         std::to_string(place.group->members.size());
}

int64_t Site::NextOccurrence(int64_t run, int64_t partition) {
  std::lock_guard lock(mutex_);
  auto* counts = occurrences_.Find(run);
  if (counts == nullptr) counts = occurrences_.Add(run, {});
  return (*counts)[partition]++;
}

std::shared_ptr<Rendezvous> Site::FindRendezvous(int64_t run, const Group& group, int64_t process,
                                                 int64_t occurrence, double timeout_s) {
  std::lock_guard lock(mutex_);
  auto* of_run = rendezvous_.Find(run);
  if (of_run == nullptr) of_run = rendezvous_.Add(run, {});
  std::shared_ptr<Rendezvous>& rendezvous = (*of_run)[{group.index, occurrence}];
  if (!rendezvous) rendezvous = Rendezvous::Open(*this, group, process, run, timeout_s);
  return rendezvous;
}

void Site::ForgetRendezvous(int64_t run, const Group& group, int64_t occurrence) {
  std::lock_guard lock(mutex_);
  if (auto* of_run = rendezvous_.Find(run)) of_run->erase({group.index, occurrence});
}

std::string Site::NameOf(const Group& group) const {
  return groups_.size() == 1 ? name_ : name_ + "/" + std::to_string(group.index);
}

void CompilationBegins() {
  std::lock_guard lock(counts_mutex);
  if (compilations++ == 0) Counts().clear();
}

void CompilationEnds() {
  std::lock_guard lock(counts_mutex);
  if (--compilations == 0) Counts().clear();
}

}  // namespace cgx::xla
