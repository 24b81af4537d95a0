#include "site.h"

#include <algorithm>
#include <atomic>
#include <string_view>
#include <unordered_map>

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

}  // namespace

ffi::TypeId Site::id = {};

Site::Site(const ffi::Dictionary& attributes)
    : groups_(GetList(attributes, "groups")),
      group_size_(Get<int64_t>(attributes, "group_size")),
      batch_(Get<int64_t>(attributes, "batch")),
      bucket_size_(Get<int64_t>(attributes, "bucket_size")),
      bits_(static_cast<int32_t>(Get<int64_t>(attributes, "bits"))),
      collective_(make<cgx_collective_t>()),
      serial_(next_serial++) {
  if (attributes.contains("processes")) processes_ = GetList(attributes, "processes");
  auto number = [&](std::string_view name) {
    return static_cast<int32_t>(Get<int64_t>(attributes, name));
  };
  collective_.verb = CGX_ALLREDUCE;
  collective_.op = number("op");
  collective_.algorithm = number("algorithm");
  collective_.rounding = number("rounding");
  collective_.gather_bits = number("gather_bits");
  collective_.skip_incomplete_buckets = number("skip_incomplete_buckets");
  collective_.minimal_size = Get<int64_t>(attributes, "minimal_size");
  std::string call(Get<std::string_view>(attributes, "call"));
  name_ = call + "#" + std::to_string(InstanceCounter::Get().Next(call));
}

Site::Place Site::Find(int64_t partition) const {
  auto found = std::find(groups_.begin(), groups_.end(), partition);
  if (found == groups_.end()) {
    throw StatusError(CGX_INTERNAL, "partition " + std::to_string(partition) +
                                        " is in no group of the mesh axes");
  }
  int64_t index = found - groups_.begin();
  auto first = groups_.begin() + index / group_size_ * group_size_;
  return {{first, first + group_size_}, index % group_size_};
}

int64_t Site::NextOccurrence(int64_t run, int64_t partition) {
  std::lock_guard lock(mutex_);
  std::vector<int64_t>* counts = occurrences_.Find(run);
  if (counts == nullptr) {
    counts = occurrences_.Add(run, std::vector<int64_t>(groups_.size(), 0));
  }
  return counts->at(partition)++;
}

void CompilationBegins() { InstanceCounter::Get().CompilationBegins(); }

void CompilationEnds() { InstanceCounter::Get().CompilationEnds(); }

}  // namespace cgx::xla
