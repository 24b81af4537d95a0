#include "registry.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace cgx {
namespace {

void count(const Communicator& communicator, Traffic* traffic) {
  const Totals totals = communicator.totals();
  traffic->add(totals.collectives, totals.bytes_in, totals.bytes_plain, communicator.bytes_sent());
}

}  // namespace

void check_name(const std::string& name) {
  constexpr size_t kLongest = 512;  // names of derived communicators are longer, but stay below
                                    // kLongestName
  require(!name.empty(), CGX_INVALID_ARGUMENT, "the communicator's name is empty: give one");
  require(name.size() <= kLongest, CGX_INVALID_ARGUMENT, "the communicator's name has ",
          name.size(), " bytes; accepted: at most ", kLongest);
}

Registry& Registry::instance() {
  static auto* registry = new Registry;  // never destroyed: threads may outlive static destructors
  return *registry;
}

void Registry::require_free(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  require_free_locked(name);
}

void Registry::require_free_locked(const std::string& name) const {
  check_name(name);
  for (const auto& [id, communicator] : communicators_)
    require(communicator->name != name, CGX_INVALID_ARGUMENT, "a communicator named '", name,
            "' exists: close it first, or use another name");
}

int32_t Registry::add(CommunicatorRef communicator) {
  const std::lock_guard lock(mutex_);
  require_free_locked(communicator->name);
  const bool world = communicator->name == kWorldName;
  had_world_ = had_world_ || world;
  const int32_t id = world ? kWorld : next_++;
  communicators_[id] = std::move(communicator);
  failures_.erase(id);  // of an earlier world
  return id;
}

CommunicatorRef Registry::find_world() const {
  const std::lock_guard lock(mutex_);
  const auto found = communicators_.find(kWorld);
  return found == communicators_.end() ? nullptr : found->second;
}

CommunicatorRef Registry::get(int32_t id) const {
  const std::lock_guard lock(mutex_);
  return get_locked(id);
}

CommunicatorRef Registry::get_locked(int32_t id) const {
  const auto found = communicators_.find(id);
  if (found != communicators_.end()) return found->second;
  const bool existed = id == kWorld ? had_world_ : id > kWorld && id < next_;
  require(!existed, CGX_CLOSED, "communicator ", id, " was closed on this rank: create a new one");
  fail(CGX_NOT_FOUND, "there is no communicator ", id, "; cgx_init creates the world, 0");
}

std::vector<CommunicatorRef> Registry::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<CommunicatorRef> all;
  for (const auto& [id, communicator] : communicators_) all.push_back(communicator);
  return all;
}

int32_t Registry::next(int32_t after) const {
  const std::lock_guard lock(mutex_);
  const auto found = communicators_.upper_bound(after);
  return found == communicators_.end() ? -1 : found->first;
}

int32_t Registry::find(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  std::string known;
  for (const auto& [id, communicator] : communicators_) {
    if (communicator->name == name) return id;
    known += join(known.empty() ? "'" : ", '", communicator->name, "'");
  }
  fail(CGX_NOT_FOUND, "no communicator is named '", name,
       "'; existing: ", known.empty() ? "none" : known);
}

CommunicatorRef Registry::remove(int32_t id) {
  const std::lock_guard lock(mutex_);
  auto communicator = get_locked(id);
  communicators_.erase(id);
  closing_.emplace(id, communicator);
  return communicator;
}

void Registry::closed(int32_t id, const CommunicatorRef& communicator) {
  std::optional<Error> failure;
  try {
    communicator->check_devices(/*finish=*/false);
  } catch (const Error& error) {
    if (error.status() != CGX_CLOSED) failure = error;
  } catch (const std::exception& error) {
    failure = Error(CGX_SYSTEM, error.what());
  }
  const std::lock_guard lock(mutex_);
  count(*communicator, &closed_traffic_);
  const auto [begin, end] = closing_.equal_range(id);
  const auto found =
      std::find_if(begin, end, [&](const auto& each) { return each.second == communicator; });
  if (found != end) closing_.erase(found);
  if (closing_.empty()) all_closed_.notify_all();
  if (failure) failures_.insert_or_assign(id, *failure);
}

CommunicatorRef Registry::get_to_check(int32_t id) const {
  {
    const std::lock_guard lock(mutex_);
    const auto closing = closing_.find(id);
    if (closing != closing_.end()) return closing->second;
    const auto failed = failures_.find(id);
    if (failed != failures_.end()) throw failed->second;
  }
  return get(id);
}

std::map<int32_t, CommunicatorRef> Registry::remove_all() {
  const std::lock_guard lock(mutex_);
  auto all = std::exchange(communicators_, {});
  closing_.insert(all.begin(), all.end());
  return all;
}

bool Registry::wait_closed(std::chrono::duration<double> at_most) {
  std::unique_lock lock(mutex_);
  return all_closed_.wait_for(lock, at_most, [&] { return closing_.empty(); });
}

void Registry::add_traffic(cgx_traffic_t* sum) const {
  const std::lock_guard lock(mutex_);
  Traffic open;
  for (const auto& [id, communicator] : communicators_) count(*communicator, &open);
  for (const auto& [id, communicator] : closing_) count(*communicator, &open);
  open.add_to(sum);
  closed_traffic_.add_to(sum);
}

}  // namespace cgx
