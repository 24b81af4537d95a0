#include "launches.h"

#include <list>
#include <map>
#include <mutex>
#include <utility>

namespace cgx::xla {
namespace {

std::mutex mutex;

std::map<int32_t, std::list<LaunchedCall*>>& InFlight() {  // guarded by mutex; by device
  static auto* in_flight = new std::map<int32_t, std::list<LaunchedCall*>>;
  return *in_flight;
}

}  // namespace

LaunchedCall::LaunchedCall(int32_t device, int64_t run, std::string name, bool named)
    : device_(device), run_(run), name_(std::move(name)), named_(named) {
  std::lock_guard lock(mutex);
  auto& calls = InFlight()[device_];
  for (LaunchedCall* other : calls) {
    const bool confusable = other->name_ == name_ || (!other->named_ && !named_);
    if (other->run_ != run_ && confusable) alone_ = other->alone_ = false;
  }
  calls.push_back(this);
}

LaunchedCall::~LaunchedCall() { Leave(); }

bool LaunchedCall::alone() const {
  std::lock_guard lock(mutex);
  return alone_;
}

bool LaunchedCall::Leave() {
  std::lock_guard lock(mutex);
  InFlight()[device_].remove(this);
  return alone_;
}

}  // namespace cgx::xla
