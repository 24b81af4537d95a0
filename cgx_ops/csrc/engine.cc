#include "engine.h"

#include <algorithm>
#include <cstring>
#include <system_error>

#include "base/cores.h"
#include "base/float_mode.h"
#include "base/status.h"

namespace cgx {
namespace {

constexpr auto kCheckInterval = std::chrono::milliseconds(20);  // deadlines, lost peers
constexpr auto kLongestSleep = std::chrono::milliseconds(10);
constexpr auto kSpinTime = std::chrono::microseconds(50);
constexpr int kLooks = 64;  // without giving way: about 10 us, longer than a small message takes
constexpr size_t kLongestNews = 900;  // bytes that every transport carries
constexpr auto kGrace = std::chrono::microseconds(200);
constexpr auto kFailedGrace = std::chrono::milliseconds(250);
constexpr int kStepsPerPass = 16;  // between two looks at the transport

uint64_t channel_key(int source, uint32_t channel) {
  return static_cast<uint64_t>(source) << 32 | channel;
}
uint32_t channel_of(uint32_t serial, int part) { return serial % (kChannels / 2) * 2 + part; }

// Adds up time on one account until another is named: one look at the clock for a run of steps of
// one collective.
class Stopwatch {
 public:
  void charge(Clock::duration* account) {
    if (account == account_) return;
    const auto now = Clock::now();
    if (account_) *account_ += now - since_;
    account_ = account;
    since_ = now;
  }

 private:
  Clock::duration* account_ = nullptr;
  Clock::time_point since_;
};

}  // namespace

class Engine::CollectivePort : public Port {
 public:
  CollectivePort(Engine* engine, Collective* collective)
      : engine_(engine), collective_(collective) {}
  BufferRef allocate(size_t bytes) override { return engine_->transport_->allocate(bytes); }
  void send(int destination, int part, const BufferRef& buffer, size_t bytes) override {
    engine_->bytes_sent_ += static_cast<int64_t>(bytes);
    engine_->transport_->send(destination, channel_of(collective_->serial, part), buffer, bytes,
                              collective_->sends);
  }
  int unreleased() const override { return collective_->sends->unreleased; }

 private:
  Engine* engine_;
  Collective* collective_;
};

Engine::Engine(std::string name, int rank, int size, std::unique_ptr<Transport> transport)
    : name_(std::move(name)),
      rank_(rank),
      size_(size),
      transport_(std::move(transport)),
      crowded_(crowded()),
      lost_(size) {}

Engine::~Engine() = default;

// ---- the caller's side ---------------------------------------------------------------------

void Engine::put(const CollectiveRef& collective) {
  const std::lock_guard lock(mutex_);
  require(!closed_, CGX_CLOSED, "communicator '", name_, "' is closed: ", close_reason_);
  collective->key = {collective->name, collective->occurrence >= 0
                                           ? static_cast<uint64_t>(collective->occurrence)
                                           : occurrences_[collective->name]++};
  collective->started = Clock::now();
  collective->deadline =
      collective->started + std::chrono::duration_cast<Clock::duration>(collective->timeout);
  submitted_.push_back(collective);
  ++in_flight_;
  if (collective->callback) ++callbacks_in_flight_;
  if (role_taken_) transport_->wake();
}

void Engine::submit(const CollectiveRef& collective) {
  {
    const std::lock_guard lock(mutex_);
    need_thread();  // before put: nothing may fail after it
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

void Engine::wait(Collective& collective) { wait_until(collective, std::nullopt); }

void Engine::wait(Collective& collective, Clock::duration at_most) {
  wait_until(collective, Clock::now() + at_most);
}

void Engine::wait_until(Collective& collective, std::optional<Clock::time_point> limit) {
  std::unique_lock lock(mutex_);
  while (!collective.done && !(limit && Clock::now() >= *limit)) {
    if (role_taken_ || stop_) {  // close() ends what is left
      if (limit)
        changed_.wait_until(lock, *limit);
      else
        changed_.wait(lock);
      continue;
    }
    role_taken_ = true;
    lock.unlock();
    drive([&] { return collective.done || stop_ || (limit && now_ >= *limit); });
    lock.lock();
    give_role();
  }
}

bool Engine::notify(Collective& collective, cgx_callback_t callback, void* context) {
  const std::lock_guard lock(mutex_);
  if (collective.done) return false;
  collective.callback = callback;
  collective.context = context;
  ++callbacks_in_flight_;
  work_given_.notify_one();  // nobody may be going to wait: the progress thread's grace is over
  return true;
}

Totals Engine::totals() const {
  const std::lock_guard lock(mutex_);
  return totals_;
}

void Engine::close(std::chrono::duration<double> at_most) {
  std::unique_lock lock(mutex_);
  if (stop_) return;
  stop_ = true;
  if (!closed_.exchange(true)) close_reason_ = "it was closed on this rank";
  work_given_.notify_all();
  transport_->wake();
  changed_.wait(lock, [&] { return !role_taken_; });
  role_taken_ = true;
  lock.unlock();
  if (thread_.joinable()) thread_.join();

  progress();  // takes in what was submitted last
  if (in_flight_) fail_all(CGX_CLOSED, "it was closed on this rank");
  // After a failure too: peers may still be about to read what ended well before it.
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

// With mutex_ held.
void Engine::give_role() {
  // What a peer needs must not lie here until this rank's next call.
  unflushed_ = !failed_ && !transport_->flushed();
  role_taken_ = false;
  changed_.notify_all();
  if (in_flight_ == 0 && !unflushed_) return;
  try {
    need_thread();                      // whoever waits may stop waiting
  } catch (const std::system_error&) {  // no thread to be had: the next call goes on
  }
  work_given_.notify_one();
}

// With mutex_ held.
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
    // Who starts a collective without a callback mostly waits for it at once, and takes the role.
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
  // Looks again at once for a moment, then gives way before it sleeps: with more ranks than cores
  // the peer that is waited for may need this one.
  auto last_work = Clock::now();
  int looks = 0;
  while (!until()) {
    if (progress()) {
      last_work = now_;
      looks = 0;
    } else if (now_ - last_work < kSpinTime) {
      if (crowded_ || ++looks > kLooks) std::this_thread::yield();
    } else if (!anything_submitted()) {  // what is put after this rings the transport's bell
      transport_->wait(kLongestSleep);
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
  for (const auto& collective : submitted) {
    if (!failed_) guard([&] { accept(collective); });
    if (failed_ && !collective->done)  // too late, or it never got among the running
      end(*collective, CGX_CLOSED, join("communicator '", name_, "' is closed: ", close_reason_));
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
  } catch (const std::exception& error) {
    fail_all(CGX_INTERNAL, error.what());
  }
}

// ---- collectives ---------------------------------------------------------------------------

void Engine::accept(const CollectiveRef& collective) {
  Collective& c = *collective;
  if (!running_.emplace(c.key, collective).second) {
    end(c, CGX_INVALID_ARGUMENT,
        join("collective ", c.key.text(), " is already in flight on communicator '", name_,
             "': give each call its own name or occurrence"));
    return;
  }
  next_check_ = {};  // a peer that it needs may be lost already
  c.serial = next_serial_++;
  c.headers.resize(size_);
  c.missing_headers = static_cast<int>(c.members.size());
  const auto begin = Clock::now();
  Header own{c.key, c.serial, c.agreement, c.algorithm->eager(), c.refusal};
  c.computed += Clock::now() - begin;
  const Bytes message = write_header(own);
  for (const int member : c.members) {
    if (member == rank_) continue;
    transport_->send_control(member, message);
    bytes_sent_ += static_cast<int64_t>(message.size());
  }
  const auto early = early_headers_.find(c.key);
  if (c.refusal.status != CGX_OK) {  // over, for this rank: what the others say is not for it
    size_t to_come = c.members.size() - 1;
    if (early != early_headers_.end()) {
      to_come -= early->second.size();
      early_headers_.erase(early);
    }
    if (to_come != 0) refused_[c.key] = to_come;
    finish(c, CGX_OK, "");
    return;
  }
  own.eager.clear();  // the algorithm has it
  take_header(c, rank_, std::move(own));
  if (early == early_headers_.end()) return;
  auto headers = std::move(early->second);
  early_headers_.erase(early);
  for (auto& [source, header] : headers) place_header(source, std::move(header));
}

// A header belongs to the running collective of its key, unless that one has the source's already
// (a fast peer is at its next use of the key) or is still to come.
void Engine::place_header(int source, Header header) {
  if (const auto refused = refused_.find(header.key); refused != refused_.end()) {
    if (--refused->second == 0) refused_.erase(refused);
    return;
  }
  const auto found = running_.find(header.key);
  if (found == running_.end() || found->second->headers[source])
    early_headers_[header.key].emplace_back(source, std::move(header));
  else
    take_header(*found->second, source, std::move(header));
}

void Engine::take_header(Collective& collective, int source, Header header) {
  if (source != rank_) {
    for (int part = 0; part < 2; ++part)
      channels_[channel_key(source, channel_of(header.serial, part))] = &collective;
    collective.algorithm->deliver_eager(source, std::move(header.eager));
  }
  collective.headers[source] = std::move(header);
  if (--collective.missing_headers == 0) agree(collective);
}

void Engine::agree(Collective& collective) {
  // Every member sees the same headers, so every member comes to the same end, with the same words.
  const int first = *std::min_element(collective.members.begin(), collective.members.end());
  for (const int member : collective.members) {
    const Refused& refused = collective.headers[member]->refused;
    if (refused.status == CGX_OK) continue;
    finish(collective, refused.status,
           join("rank ", member, " takes no part in collective ", collective.key.text(), ": ",
                refused.message));
    return;
  }
  const Agreement& reference = collective.headers[first]->agreement;
  for (const int member : collective.members) {
    const Agreement& other = collective.headers[member]->agreement;
    if (std::memcmp(&reference, &other, sizeof(Agreement)) == 0) continue;
    finish(collective, CGX_MISMATCH,
           join("ranks ", first, " and ", member, " disagree on collective ", collective.key.text(),
                ": ", difference(reference, other),
                "; every rank must call it with the same arguments, in the same order or by name"));
    return;
  }
  collective.agreed = true;
  collective.agreed_at = Clock::now();
  auto early = std::move(collective.early);
  for (auto& [part, arrival] : early) collective.algorithm->deliver(part, std::move(arrival));
  enqueue(collective);
}

void Engine::enqueue(Collective& collective) {
  if (std::exchange(collective.queued, true)) return;
  ready_.push_back(&collective);
}

bool Engine::run_queue() {
  bool worked = false;
  for (Collective* collective : std::exchange(blocked_, {})) enqueue(*collective);
  Stopwatch stopwatch;
  for (int steps = 0; steps < kStepsPerPass && !ready_.empty(); ++steps) {
    Collective& collective = *ready_.front();
    ready_.pop_front();
    collective.queued = false;
    CollectivePort port(this, &collective);
    stopwatch.charge(&collective.computed);
    const Step step = collective.algorithm->step(port);
    worked |= step == Step::kWorked;
    if (step == Step::kWorked)
      enqueue(collective);
    else if (collective.algorithm->finished())
      finishing_.push_back(&collective);
    else if (step == Step::kBlocked)
      blocked_.push_back(&collective);
  }
  stopwatch.charge(nullptr);
  // Order of finishing_ does not matter: collectives are independent.
  for (size_t i = 0; i < finishing_.size();) {
    if (finishing_[i]->sends->unsent != 0) {
      ++i;
      continue;
    }
    Collective* collective = finishing_[i];
    finishing_[i] = finishing_.back();
    finishing_.pop_back();
    finish(*collective, CGX_OK, "");
    worked = true;
  }
  return worked;
}

void Engine::finish(Collective& collective, cgx_status_t status, std::string error) {
  const CollectiveRef keep = running_.at(collective.key);
  running_.erase(collective.key);
  for (int source = 0; source < static_cast<int>(collective.headers.size()); ++source)
    if (source != rank_ && collective.headers[source])
      for (int part = 0; part < 2; ++part)
        channels_.erase(channel_key(source, channel_of(collective.headers[source]->serial, part)));
  if (collective.queued) std::erase(ready_, &collective);
  std::erase(blocked_, &collective);
  std::erase(finishing_, &collective);
  // What it holds of the transport goes back while this thread has the role.
  collective.early.clear();
  collective.headers.clear();
  end(collective, status, std::move(error));
}

void Engine::end(Collective& collective, cgx_status_t status, std::string error) {
  const auto ended = Clock::now();
  collective.algorithm.reset();
  collective.status = status;
  collective.error = std::move(error);
  std::unique_lock lock(mutex_);
  if (status == CGX_OK && collective.counts) totals_.add(collective, ended);
  if (collective.callback) {
    --callbacks_in_flight_;
    lock.unlock();
    try {
      collective.callback(collective.context, status, collective.error.c_str());
    } catch (...) {  // against its contract; whoever waits must see the end all the same
    }
    lock.lock();
  }
  // Under the lock that saw whether there is a callback: notify() comes before it or after `done`.
  --in_flight_;
  collective.done = true;
  changed_.notify_all();
}

// ---- messages ------------------------------------------------------------------------------

void Engine::on_control(int source, std::span<const std::byte> message) {
  if (control_kind(message) == ControlKind::kAbort) {
    on_peer_lost(source, Loss::kGaveUp, read_abort(message));
    return;
  }
  place_header(source, read_header(message));
}

void Engine::on_bulk(Arrival arrival) {
  const auto found = channels_.find(channel_key(arrival.source, arrival.channel));
  if (found == channels_.end()) return;  // of a collective that has failed here
  Collective& collective = *found->second;
  const int part = static_cast<int>(arrival.channel % 2);
  if (!collective.agreed) {
    collective.early.emplace_back(part, std::move(arrival));
    return;
  }
  collective.algorithm->deliver(part, std::move(arrival));
  enqueue(collective);
}

// ---- failure -------------------------------------------------------------------------------

bool Engine::waits_for(const Collective& collective, int rank) const {
  if (rank == rank_ || std::find(collective.members.begin(), collective.members.end(), rank) ==
                           collective.members.end())
    return false;
  return !collective.headers[rank] || (collective.agreed && collective.algorithm->waits_for(rank));
}

// A peer's loss ends nothing by itself: what it sent before it went has been delivered, and may be
// all that the collectives in flight need. Those that need more, now or later, find it missing.
void Engine::on_peer_lost(int rank, Loss how, const std::string& reason) {
  if (lost_[rank]) return;
  lost_[rank] = {how, reason};
  if (how != Loss::kLeft) peer_failed_ = true;
  next_check_ = {};
}

void Engine::check_waits() {
  next_check_ = now_ + kCheckInterval;
  for (const auto& [key, collective] : running_) {
    for (const int member : collective->members) {
      if (!lost_[member] || !waits_for(*collective, member)) continue;
      const auto& [how, reason] = *lost_[member];
      if (how == Loss::kGaveUp)
        fail_all(CGX_PEER_FAILED, reason, nullptr, true);
      else
        fail_all(CGX_PEER_FAILED, join("rank ", member, " is lost: ", reason));
      return;
    }
    if (now_ < collective->deadline) continue;
    fail_all(CGX_TIMEOUT, describe_wait(*collective), collective.get());
    return;
  }
}

std::string Engine::describe_wait(const Collective& collective) const {
  std::string text = join("collective ", collective.key.text(), " did not end within ",
                          collective.timeout.count(), " s");
  for (const int member : collective.members) {
    if (!waits_for(collective, member)) continue;
    if (collective.headers[member]) {
      text += join("; rank ", member, " is late in phase ", collective.algorithm->phase());
      continue;
    }
    text += join("; rank ", member, " has not started it (phase header)");
    const auto other =
        std::find_if(early_headers_.begin(), early_headers_.end(), [&](const auto& early) {
          return std::any_of(early.second.begin(), early.second.end(),
                             [&](const auto& entry) { return entry.first == member; });
        });
    if (other != early_headers_.end()) text += join(", but has started ", other->first.text());
  }
  return text;
}

void Engine::fail_all(cgx_status_t status, const std::string& reason, Collective* cause,
                      bool told) {
  {
    const std::lock_guard lock(mutex_);
    if (failed_.exchange(true)) return;
    closed_ = true;
    close_reason_ = reason;
  }
  // Peers first: their collectives wait for this rank. What was told is passed on as it is.
  const std::string news =
      (told ? reason : join("rank ", rank_, " gave up: ", reason)).substr(0, kLongestNews);
  try {
    const Bytes abort = write_abort(news);
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank_ && !lost_[peer]) transport_->send_control(peer, abort);
  } catch (const std::exception&) {  // the transport may be what failed; leave() tells them too
  }
  while (!running_.empty()) {
    Collective& collective = *running_.begin()->second;
    std::string text = join("communicator '", name_, "', rank ", rank_, ": ", reason);
    if (&collective != cause) {
      text += join(" [while collective ", collective.key.text(), " was in phase ",
                   collective.agreed ? collective.algorithm->phase() : "header", "]");
    }
    finish(collective, status, std::move(text));
  }
  early_headers_.clear();
  transport_->leave(false, news);
}

}  // namespace cgx
