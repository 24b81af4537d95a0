#include "engine/engine.h"

#include <algorithm>
#include <cstring>
#include <system_error>

#include "base/cores.h"
#include "base/float_mode.h"
#include "base/status.h"

namespace cgx {
namespace {

constexpr auto kLongestSleep = std::chrono::milliseconds(10);
// How long a rank polls before it sleeps. A wake-up costs the peer 30 us and this rank 30 to 90 us
// on a virtual machine, so polling takes about as long. It is shorter if ranks outnumber cores.
constexpr auto kSpinTime = std::chrono::microseconds(100);
constexpr auto kCrowdedSpinTime = std::chrono::microseconds(50);
constexpr int kPollsWithoutYield = 64;  // polls without yielding: about 10 us, longer than a small
                                        // message takes
constexpr auto kGrace = std::chrono::microseconds(200);
constexpr auto kFailedGrace = std::chrono::milliseconds(250);

}  // namespace

Engine::Engine(std::string name, int rank, int size, std::unique_ptr<Transport> transport)
    : name_(std::move(name)),
      rank_(rank),
      size_(size),
      transport_(std::move(transport)),
      crowded_(crowded()),
      headers_sent_(size),
      headers_taken_(size),
      last_serial_(size, UINT32_MAX),
      lost_(size) {}

Engine::~Engine() = default;

// ---- calls from users ----------------------------------------------------------------------

std::string Engine::closed_text() const {
  return join("communicator '", name_, "' is closed: ", close_reason_);
}

void Engine::require_open() const {
  if (!closed_) return;
  const std::lock_guard lock(mutex_);
  fail(CGX_CLOSED, closed_text());
}

void Engine::put(const CollectiveRef& collective) {
  const std::lock_guard lock(mutex_);
  if (closed_) fail(CGX_CLOSED, closed_text());
  collective->key = {collective->name, collective->occurrence >= 0
                                           ? static_cast<uint64_t>(collective->occurrence)
                                       : collective->name.empty() ? unnamed_++
                                                                  : Key::kNext};
  collective->started = Clock::now();
  collective->deadline =
      collective->started + std::chrono::duration_cast<Clock::duration>(collective->timeout);
  submitted_.push_back(collective);
  ++in_flight_;
  if (!collective->announcement) ++needed_;
  if (collective->callback) ++callbacks_in_flight_;
  if (role_taken_) transport_->wake();
}

void Engine::submit(const CollectiveRef& collective) {
  try {
    const std::lock_guard lock(mutex_);
    need_thread();  // before put(), after which nothing may fail
  } catch (const std::system_error& error) {
    // A refusal is sent below, and does not need the thread afterwards.
    require(collective->refusal.status != CGX_OK, CGX_SYSTEM,
            "cannot start the progress thread: ", error.what(),
            ". Raise the limit on processes (ulimit -u, or the container's)");
  }
  put(collective);
  if (try_take_role()) {  // announce it now: peers may be waiting for the header
    progress();
    const std::lock_guard lock(mutex_);
    give_role();
  }
}

void Engine::run(const CollectiveRef& collective) {
  put(collective);
  wait(*collective);
}

void Engine::run(const CollectiveRef& collective, Clock::duration at_most) {
  put(collective);
  wait(*collective, at_most);
}

void Engine::wait(Collective& collective) {
  wait_until([&] { return collective.done.load(); }, std::nullopt);
}

void Engine::wait(Collective& collective, Clock::duration at_most) {
  wait_until([&] { return collective.done.load(); }, Clock::now() + at_most);
}

void Engine::finish(Clock::duration at_most) {
  wait_until([&] { return needed_ == 0; }, Clock::now() + at_most);
}

void Engine::require_peers(Clock::duration at_most) {
  wait_until([&] { return closed_ || peer_lost_; }, Clock::now() + at_most);
  const std::lock_guard lock(mutex_);
  require(!closed_ && !peer_lost_, CGX_PEER_FAILED, "communicator '", name_,
          "': ", closed_ ? close_reason_ : losses_);
}

template <typename Done>
void Engine::wait_until(Done&& done, std::optional<Clock::time_point> limit) {
  std::unique_lock lock(mutex_);
  while (!done()) {
    const bool over = limit && Clock::now() >= *limit;
    if (role_taken_ || stop_) {  // close() ends the rest
      if (over) return;
      if (limit)
        changed_.wait_until(lock, *limit);
      else
        changed_.wait(lock);
      continue;
    }
    role_taken_ = true;
    lock.unlock();
    if (over)
      progress();  // peers may wait for the header of a new collective
    else
      drive([&] { return done() || stop_ || (limit && now_ >= *limit); });
    lock.lock();
    give_role();
    if (over) return;
  }
}

bool Engine::notify(Collective& collective, cgx_callback_t callback, void* context) {
  const std::lock_guard lock(mutex_);
  if (collective.done) return false;
  collective.callback = callback;
  collective.context = context;
  ++callbacks_in_flight_;
  work_given_.notify_one();  // wakes the progress thread, whose grace period has ended: the caller
                             // may never wait
  return true;
}

Totals Engine::totals() const {
  const std::lock_guard lock(mutex_);
  return totals_;
}

void Engine::close(std::chrono::duration<double> at_most) {
  stop(at_most, "it was closed on this rank", /*failed=*/false);
}

void Engine::abort(const std::string& reason) { stop(kFailedGrace, reason, /*failed=*/true); }

void Engine::stop(std::chrono::duration<double> at_most, const std::string& reason, bool failed) {
  std::unique_lock lock(mutex_);
  if (stop_) return;
  stop_ = true;
  if (!closed_.exchange(true)) close_reason_ = reason;
  work_given_.notify_all();
  transport_->wake();
  changed_.wait(lock, [&] { return !role_taken_; });
  role_taken_ = true;
  lock.unlock();
  if (thread_.joinable()) thread_.join();

  progress();  // accepts the last submissions
  drop_announcements(reason);
  if (failed || in_flight_) fail_all(CGX_CLOSED, reason);
  // Also after a failure: peers may not have read the results of earlier collectives yet.
  if (failed_) at_most = std::min<std::chrono::duration<double>>(at_most, kFailedGrace);
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(at_most);
  drive([&] { return transport_->drained() || Clock::now() >= deadline; });
  if (!failed_) transport_->leave(transport_->drained(), "it closed the communicator");
}

// ---- the progress role ---------------------------------------------------------------------

bool Engine::try_take_role() {
  const std::lock_guard lock(mutex_);
  return !std::exchange(role_taken_, true);
}

// Needs mutex_.
void Engine::give_role() {
  // Messages that peers need must not stay here until this rank's next call.
  unflushed_ = !failed_ && !transport_->flushed();
  role_taken_ = false;
  changed_.notify_all();
  if (in_flight_ == 0 && !unflushed_) return;
  try {
    need_thread();                      // the current waiter may stop waiting
  } catch (const std::system_error&) {  // without a thread, the next call makes progress
  }
  work_given_.notify_one();
}

// Needs mutex_.
void Engine::need_thread() {
  if (!thread_.joinable() && !stop_) thread_ = std::thread([this] { progress_thread(); });
}

void Engine::progress_thread() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (role_taken_ || (in_flight_ == 0 && !unflushed_)) {
      work_given_.wait(lock);
      continue;
    }
    // A caller without a callback usually waits immediately, and takes the role.
    if (callbacks_in_flight_ == 0 &&
        work_given_.wait_for(lock, kGrace) == std::cv_status::no_timeout)
      continue;
    if (role_taken_ || stop_) continue;
    role_taken_ = true;
    lock.unlock();
    drive([&] { return stop_ || (in_flight_ == 0 && (failed_ || transport_->flushed())); });
    lock.lock();
    give_role();
  }
}

template <typename Until>
void Engine::drive(Until&& until) {
  // Polls for a moment, then yields before it sleeps. If ranks outnumber cores, the awaited peer
  // may need this core.
  const auto spin_time = crowded_ ? kCrowdedSpinTime : kSpinTime;
  auto last_work = Clock::now(), last_idle = last_work;
  int polls = 0;
  // Whether polling was successful the last time. While a slow link transfers large messages it is
  // not, and would take a tenth of a core from the overlapping backward pass.
  bool worthwhile = true;
  while (!until()) {
    if (progress()) {
      if (last_idle != last_work) worthwhile = last_idle - last_work < 2 * spin_time;
      last_work = last_idle = now_;
      polls = 0;
    } else if (worthwhile && now_ - last_work < spin_time) {
      last_idle = now_;
      if (crowded_ || ++polls > kPollsWithoutYield) std::this_thread::yield();
    } else if (!anything_submitted()) {  // later submissions wake the transport
      transport_->wait(kLongestSleep);
      last_idle = Clock::now();
    }
  }
}

bool Engine::anything_submitted() {
  const std::lock_guard lock(mutex_);
  return !submitted_.empty();
}

bool Engine::progress() {
  const FloatMode mode;
  std::vector<CollectiveRef> submitted;
  {
    const std::lock_guard lock(mutex_);
    submitted.swap(submitted_);
  }
  bool worked = !submitted.empty();
  // Peers may have given up on a rank that has not polled for long. Find out before starting
  // anything.
  if (worked && submitted.front()->started - now_ > kLongestSleep)
    guard([&] { transport_->progress(*this); });
  for (const auto& collective : submitted) {
    if (!failed_) guard([&] { accept(collective); });
    if (failed_ && !collective->done)  // too late, or it was never added to running_
      end(*collective, CGX_CLOSED, closed_text());
  }
  guard([&] {
    worked |= transport_->progress(*this);
    worked |= run_queue();
  });
  now_ = Clock::now();
  if (now_ >= next_check_) guard([&] { check_waits(); });
  return worked;
}

template <typename Work>
void Engine::guard(Work&& work) {
  try {
    work();
  } catch (const Error& error) {
    fail_all(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    fail_all(CGX_SYSTEM, "out of memory");
  } catch (const std::exception& error) {
    fail_all(CGX_INTERNAL, error.what());
  }
}

}  // namespace cgx
