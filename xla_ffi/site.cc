#include "site.h"

#include <algorithm>
#include <atomic>
#include <string_view>
#include <unordered_map>

#include "meeting.h"

namespace cgx::xla {
namespace {

std::atomic<int64_t> next_serial{0};

// How often each call id has been instantiated for the executable that is being compiled.
class InstanceCounter {
 public:
  static InstanceCounter& Get() {
    static auto* counter = new InstanceCounter;
    return *counter;
  }

  int64_t Next(const std::string& call) {
    std::lock_guard lock(mutex_);
    return counts_[call]++;
  }

  void CompilationBegins() {
    std::lock_guard lock(mutex_);
    if (compilations_++ == 0) counts_.clear();
  }

  void CompilationEnds() {
    std::lock_guard lock(mutex_);
    if (--compilations_ == 0) counts_.clear();
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, int64_t> counts_;
  int64_t compilations_ = 0;  // under way
};

template <typename T>
T Get(const ffi::Dictionary& attributes, std::string_view name) {
  ffi::ErrorOr<T> value = attributes.get<T>(name);
  if (!value) {
    throw StatusError(CGX_INTERNAL, "the custom call has no attribute '" + std::string(name) +
                                        "' of the right type: " + value.error().message() +
                                        ". Was it lowered by another version of cgx_ops?");
  }
  return *value;
}

std::vector<int64_t> GetList(const ffi::Dictionary& attributes, std::string_view name) {
  auto span = Get<ffi::Span<const int64_t>>(attributes, name);
  return {span.begin(), span.end()};
}

// The groups, each with the processes of its members; `processes` is by partition, or empty.
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

Site::Site(const ffi::Dictionary& attributes)
    : bucket_size_(Get<int64_t>(attributes, "bucket_size")),
      named_(Get<int64_t>(attributes, "named") != 0),
      returns_errors_(Get<int64_t>(attributes, "errors") != 0),
      collective_(make<cgx_collective_t>()),
      serial_(next_serial++) {
  std::vector<int64_t> processes;
  if (attributes.contains("processes")) processes = GetList(attributes, "processes");
  groups_ =
      MakeGroups(GetList(attributes, "groups"), Get<int64_t>(attributes, "group_size"), processes);
  const std::vector<int64_t> bits = GetList(attributes, "bits");
  const std::vector<int64_t> batches = GetList(attributes, "batches");
  for (size_t leaf = 0; leaf < bits.size(); ++leaf)
    leaves_.push_back({static_cast<int32_t>(bits[leaf]), batches.at(leaf)});
  auto number = [&](std::string_view name) {
    return static_cast<int32_t>(Get<int64_t>(attributes, name));
  };
  collective_.verb = number("verb");
  collective_.op = number("op");
  collective_.algorithm = number("algorithm");
  collective_.rounding = number("rounding");
  collective_.gather_bits = number("gather_bits");
  collective_.intra_bits = number("intra_bits");
  collective_.skip_incomplete_buckets = number("skip_incomplete_buckets");
  collective_.minimal_size = Get<int64_t>(attributes, "minimal_size");
  std::string call(Get<std::string_view>(attributes, "call"));
  name_ = call + "#" + std::to_string(InstanceCounter::Get().Next(call));
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

int64_t Site::NextOccurrence(int64_t run, int64_t partition) {
  std::lock_guard lock(mutex_);
  auto* counts = occurrences_.Find(run);
  if (counts == nullptr) counts = occurrences_.Add(run, {});
  return (*counts)[partition]++;
}

std::shared_ptr<Meeting> Site::FindMeeting(int64_t run, const Group& group, int64_t process,
                                           int64_t occurrence, double timeout_s) {
  std::lock_guard lock(mutex_);
  auto* meetings = meetings_.Find(run);
  if (meetings == nullptr) meetings = meetings_.Add(run, {});
  std::shared_ptr<Meeting>& meeting = (*meetings)[{group.index, occurrence}];
  if (!meeting) meeting = Meeting::Open(*this, group, process, timeout_s);
  return meeting;
}

void Site::ForgetMeeting(int64_t run, const Group& group, int64_t occurrence) {
  std::lock_guard lock(mutex_);
  if (auto* meetings = meetings_.Find(run)) meetings->erase({group.index, occurrence});
}

std::string Site::NameOf(const Group& group) const {
  return groups_.size() == 1 ? name_ : name_ + "/" + std::to_string(group.index);
}

const char* Site::function() const {
  static constexpr const char* kFunctions[] = {"psum_q", "psum_scatter_q", "all_gather_q"};
  return kFunctions[collective_.verb];
}

void CompilationBegins() { InstanceCounter::Get().CompilationBegins(); }

void CompilationEnds() { InstanceCounter::Get().CompilationEnds(); }

}  // namespace cgx::xla
