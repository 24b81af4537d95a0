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
constexpr uint32_t kSerials = kChannels / 2;  // that channels can tell apart
uint32_t channel_of(uint32_t serial, int part) { return serial % kSerials * 2 + part; }

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
    const uint32_t number = collective_->sent[part][destination]++;
    const Slot slot{channel_of(collective_->serial, part), number % kSequences};
    engine_->transport_->send(destination, slot, buffer, bytes, collective_->sends);
  }
  int unreleased() const override { return collective_->sends->unreleased(); }

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
      headers_sent_(size),
      headers_taken_(size),
      last_serial_(size, UINT32_MAX),
      lost_(size) {}

Engine::~Engine() = default;

// ---- the caller's side ---------------------------------------------------------------------

void Engine::put(const CollectiveRef& collective) {
  const std::lock_guard lock(mutex_);
  require(!closed_, CGX_CLOSED, "communicator '", name_, "' is closed: ", close_reason_);
  collective->key = {collective->name, collective->occurrence >= 0
                                           ? static_cast<uint64_t>(collective->occurrence)
                                       : collective->name.empty() ? unnamed_++
                                                                  : Key::kNext};
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
  if (c.key.occurrence != Key::kNext && running_.contains(c.key)) {
    end(c, CGX_INVALID_ARGUMENT,
        join("collective ", c.key.text(), " is already in flight on communicator '", name_,
             "': give each call its own name or occurrence"));
    return;
  }
  running_.emplace(c.key, collective);
  next_check_ = {};  // a peer that it needs may be lost already
  c.serial = next_serial_++;
  c.sends = std::make_shared<SendState>(size_);
  for (auto& sent : c.sent) sent.resize(size_);
  c.headers.resize(size_);
  c.missing_headers = static_cast<int>(c.members.size());
  const auto begin = Clock::now();
  Header own{c.key, c.serial, 0, c.agreement, c.algorithm->eager(), c.refusal};
  c.computed += Clock::now() - begin;
  for (const int member : c.members) {
    if (member == rank_) continue;
    own.turn = headers_sent_[member]++;
    const Bytes message = write_header(own);
    transport_->send_control(member, message);
    bytes_sent_ += static_cast<int64_t>(message.size());
  }
  // Over, for this rank, if it refuses; what the others say of it is still to come, and is not for
  // what follows.
  if (c.refusal.status != CGX_OK) finish(c, CGX_OK, "");
  own.eager.clear();  // the algorithm has it
  Uses& uses = uses_[c.key];
  uses.open.push_back(collective);
  std::vector<std::pair<int, Header>> mine;  // the first of each source
  std::erase_if(uses.early, [&](auto& early) {
    for (const auto& [source, header] : mine)
      if (source == early.first) return false;
    mine.push_back(std::move(early));
    return true;
  });
  match(collective, rank_, std::move(own));
  for (auto& [source, header] : mine) match(collective, source, std::move(header));
}

// A header belongs to the oldest collective of its key that lacks its source's, or to one that is
// still to come.
void Engine::take_header(int source, Header header) {
  const uint32_t due = headers_taken_[source]++;
  require(header.turn == due, CGX_PEER_FAILED, "rank ", source, " announced collective ",
          header.key.text(), " as number ", header.turn, " of all, where number ", due,
          " is due: an announcement is lost, doubled or out of turn");
  last_serial_[source] = header.serial;
  Uses& uses = uses_[header.key];
  for (const CollectiveRef& collective : uses.open)
    if (!collective->headers[source])
      return match(CollectiveRef(collective), source, std::move(header));
  uses.early.emplace_back(source, std::move(header));
}

void Engine::match(const CollectiveRef& ref, int source, Header header) {
  Collective& collective = *ref;
  require(std::find(collective.members.begin(), collective.members.end(), source) !=
              collective.members.end(),
          CGX_PEER_FAILED, "rank ", source, " takes part in collective ", collective.key.text(),
          ", but is not one of its members");
  const bool refused = collective.refusal.status != CGX_OK;
  if (source != rank_ && !refused)
    for (int part = 0; part < 2; ++part)
      channels_[channel_key(source, channel_of(header.serial, part))] = {&collective};
  collective.headers[source] = std::move(header);
  if (--collective.missing_headers != 0) return;
  const auto found = uses_.find(collective.key);
  found->second.open.pop_front();  // it is the oldest: those after it lack the same header, or more
  if (found->second.open.empty() && found->second.early.empty()) uses_.erase(found);
  if (!refused) agree(collective);
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
  if (collective.shortage) return cancel(collective);
  for (const int member : collective.members)
    if (member != rank_)
      collective.algorithm->deliver_eager(member, std::move(collective.headers[member]->eager));
  auto early = std::move(collective.early);
  for (auto& [part, arrival] : early) collective.algorithm->deliver(part, std::move(arrival));
  enqueue(collective);
}

// This rank cannot go on with it. Those that are done with it have the right values; the others
// end with this error. All headers are here, so nothing of it can be taken for another's.
void Engine::cancel(Collective& collective) {
  const cgx_status_t status = collective.shortage->status();
  const std::string reason =
      join("rank ", rank_, " cannot go on with collective ", collective.key.text(), ": ",
           collective.shortage->what())
          .substr(0, kLongestNews);
  const Bytes message = write_cancel({collective.serial, {status, reason}});
  for (const int member : collective.members)
    if (member != rank_ && !lost_[member]) transport_->send_control(member, message);
  finish(collective, status, reason);
}

void Engine::take_cancel(int source, const Cancel& cancel) {
  const auto found = channels_.find(channel_key(source, channel_of(cancel.serial, 0)));
  if (found != channels_.end()) {
    Collective& collective = *found->second.collective;
    if (collective.agreed)
      finish(collective, cancel.reason.status, cancel.reason.message);
    else  // with the last header it ends
      collective.headers[source]->refused = cancel.reason;
    return;
  }
  for (auto& [key, uses] : uses_)
    for (auto& [member, header] : uses.early)
      if (member == source && header.serial == cancel.serial) header.refused = cancel.reason;
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
    Step step = Step::kIdle;
    try {
      step = collective.algorithm->step(port);
    } catch (const Error& error) {
      if (error.status() != CGX_SYSTEM && error.status() != CGX_UNSUPPORTED) throw;
      collective.shortage = error;
    } catch (const std::bad_alloc&) {
      collective.shortage = Error(CGX_SYSTEM, "out of memory");
    }
    if (collective.shortage) {
      stopwatch.charge(nullptr);
      cancel(collective);
      worked = true;
      continue;
    }
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
    if (finishing_[i]->sends->unsent() != 0) {
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
  const auto [first, last] = running_.equal_range(collective.key);
  const auto place = std::find_if(
      first, last, [&](const auto& entry) { return entry.second.get() == &collective; });
  const CollectiveRef keep = place->second;
  running_.erase(place);
  for (int source = 0; source < static_cast<int>(collective.headers.size()); ++source)
    if (source != rank_ && collective.headers[source])
      for (int part = 0; part < 2; ++part)
        channels_.erase(channel_key(source, channel_of(collective.headers[source]->serial, part)));
  if (collective.queued) std::erase(ready_, &collective);
  std::erase(blocked_, &collective);
  std::erase(finishing_, &collective);
  // What it holds of the transport goes back while this thread has the role.
  collective.early.clear();
  if (collective.missing_headers == 0) collective.headers.clear();  // else they are still counted
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
  Message read = read_message(source, message);
  if (auto* header = std::get_if<Header>(&read))
    take_header(source, std::move(*header));
  else if (const auto* cancel = std::get_if<Cancel>(&read))
    take_cancel(source, *cancel);
  else
    on_peer_lost(source, Loss::kGaveUp, std::get<Abort>(read).reason);
}

// The channel of a bulk message, which is counted; null if its collective has ended here.
Engine::Channel* Engine::channel(int source, Slot slot) {
  const auto found = channels_.find(channel_key(source, slot.channel));
  if (found == channels_.end()) {
    const uint32_t age = (last_serial_[source] - slot.channel / 2) % kSerials;
    require(age < kSerials / 2, CGX_PEER_FAILED, "rank ", source,
            " sent a message of a collective that it has not announced");
    return nullptr;
  }
  Channel& channel = found->second;
  require(slot.sequence == channel.next, CGX_PEER_FAILED, "rank ", source, " sent message ",
          slot.sequence, " of collective ", channel.collective->key.text(), " where message ",
          channel.next, " is due: one is lost, doubled or out of turn");
  channel.next = (channel.next + 1) % kSequences;
  return &channel;
}

void Engine::on_bulk(Arrival arrival) {
  const Channel* const of = channel(arrival.source, arrival.slot);
  if (of == nullptr) return;
  Collective& collective = *of->collective;
  const int part = static_cast<int>(arrival.slot.channel % 2);
  if (!collective.agreed) {
    collective.early.emplace_back(part, std::move(arrival));
    return;
  }
  collective.algorithm->deliver(part, std::move(arrival));
  enqueue(collective);
}

void Engine::on_unreadable(int source, Slot slot, const Error& error) {
  const Channel* const of = channel(source, slot);
  if (of == nullptr) return;
  of->collective->shortage = error;
  if (of->collective->agreed) cancel(*of->collective);
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
    if (!waits_for(collective, member)) {
      if (collective.sends->unread_by(member))
        text += join("; rank ", member, " has not read what was sent to it");
      continue;
    }
    if (collective.headers[member]) {
      text += join("; rank ", member, " is late in phase ", collective.algorithm->phase());
      continue;
    }
    text += join("; rank ", member, " has not started it (phase header)");
    const auto other =
        std::find_if(uses_.begin(), uses_.end(), [&](const auto& each) {
          const auto& early = each.second.early;
          return std::any_of(early.begin(), early.end(),
                             [&](const auto& entry) { return entry.first == member; });
        });
    if (other != uses_.end()) text += join(", but has started ", other->first.text());
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
  uses_.clear();
  transport_->leave(false, news);
}

}  // namespace cgx
