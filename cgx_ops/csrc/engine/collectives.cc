// The engine's collectives: announcing, matching headers, running, ending; and their messages.
#include <algorithm>
#include <utility>

#include "base/status.h"
#include "engine/engine.h"

namespace cgx {
namespace {

constexpr int kStepsPerPass = 16;  // between two polls of the transport

// Adds elapsed time to one account until another is selected. A run of steps of one collective
// needs a single clock read.
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
    const uint32_t number = collective_->sent[destination][part]++;
    const Slot slot{channel_of(collective_->serial, part), number % kSequences};
    engine_->transport_->send(destination, slot, buffer, bytes, collective_->sends);
  }
  int unreleased() const override { return collective_->sends->unreleased(); }

 private:
  Engine* engine_;
  Collective* collective_;
};

// ---- collectives ---------------------------------------------------------------------------

void Engine::accept(const CollectiveRef& collective) {
  Collective& c = *collective;
  if (c.key.occurrence != Key::kNext && running_.contains(c.key)) {
    end(c, CGX_INVALID_ARGUMENT,
        join("collective ", c.key, " is already in flight on communicator '", name_,
             "': give each call its own name or occurrence"));
    return;
  }
  running_.emplace(c.key, collective);
  next_check_ = {};  // check now: a peer that it needs may be lost already
  c.serial = next_serial_++;
  c.sends = std::make_shared<SendState>(size_);
  c.sent.resize(size_);
  c.headers.resize(size_);
  c.missing_headers = static_cast<int>(c.members.size());
  const auto begin = Clock::now();
  Header own{c.key, c.serial, 0, c.agreement, {}, c.refusal};
  try {
    own.eager = c.algorithm->eager();
  } catch (const std::bad_alloc&) {  // all ranks end with it when all headers have arrived
    own.refused = {CGX_SYSTEM, "out of memory"};
  }
  c.computed += Clock::now() - begin;
  for (const int member : c.members) {
    if (member == rank_) continue;
    own.turn = headers_sent_[member]++;
    const Bytes message = write_header(own);
    transport_->send_control(member, message);
    bytes_sent_ += static_cast<int64_t>(message.size());
  }
  // A refusing rank is done. The peers' headers are still counted, so that they do not match a
  // later collective.
  if (c.refusal.status != CGX_OK) finish(c, CGX_OK, "");
  own.eager.clear();  // the algorithm has it
  Uses& uses = uses_[c.key];
  uses.open.push_back(collective);
  std::vector<std::pair<int, Header>> mine;  // the first header of each source
  std::erase_if(uses.early, [&](auto& early) {
    for (const auto& [source, header] : mine)
      if (source == early.first) return false;
    mine.push_back(std::move(early));
    return true;
  });
  match(collective, rank_, std::move(own));
  for (auto& [source, header] : mine) match(collective, source, std::move(header));
}

// A header belongs to the oldest collective of its key that lacks its source's header, or to one
// that has not started here.
void Engine::take(int source, Header header) {
  const uint32_t due = headers_taken_[source]++ % kTurns;
  require(header.turn == due, CGX_PEER_FAILED, "rank ", source, " sent the header of collective ",
          header.key, " with number ", header.turn, ", but number ", due,
          " is due: a header was lost, duplicated or reordered");
  // Numbers of collectives among other ranks are left out.
  require(header.serial - last_serial_[source] - 1 < UINT32_MAX / 2, CGX_PEER_FAILED, "rank ",
          source, " sent the header of collective ", header.key, " with serial ", header.serial,
          " after ", last_serial_[source]);
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
          CGX_PEER_FAILED, "rank ", source, " sent a header of collective ", collective.key,
          ", but is not one of its members");
  const bool refused = collective.refusal.status != CGX_OK;
  if (source != rank_ && !refused) incoming_[incoming_key(source, header.serial)] = {&collective};
  collective.headers[source] = std::move(header);
  if (--collective.missing_headers != 0) return;
  const auto found = uses_.find(collective.key);
  auto& open = found->second.open;
  std::erase(open, ref);
  if (open.empty() && found->second.early.empty()) uses_.erase(found);
  if (!refused) agree(collective);
}

void Engine::agree(Collective& collective) {
  // All members see the same headers, so all end in the same way, with the same text.
  const int first = *std::min_element(collective.members.begin(), collective.members.end());
  for (const int member : collective.members) {
    const Refused& refused = collective.headers[member]->refused;
    if (refused.status == CGX_OK) continue;
    finish(collective, refused.status,
           join("rank ", member, " takes no part in collective ", collective.key, ": ",
                refused.message));
    return;
  }
  const Agreement& reference = collective.headers[first]->agreement;
  for (const int member : collective.members) {
    const Agreement& other = collective.headers[member]->agreement;
    if (agreements_match(reference, other)) continue;
    finish(collective, CGX_MISMATCH,
           join("ranks ", first, " and ", member, " disagree on collective ", collective.key, ": ",
                difference(reference, other),
                "; every rank must call it with the same arguments, in the same order or by name"));
    return;
  }
  collective.agreed = true;
  collective.agreed_at = Clock::now();
  for (const int member : collective.members)
    if (member != rank_)
      collective.algorithm->deliver_eager(member, std::move(collective.headers[member]->eager));
  if (const std::string text = collective.algorithm->disagreement(); !text.empty())
    return finish(collective, CGX_MISMATCH,
                  join("ranks disagree on collective ", collective.key, ": ", text));
  if (collective.shortage) return cancel(collective);
  auto early = std::move(collective.early);
  for (auto& [part, arrival] : early) collective.algorithm->deliver(part, std::move(arrival));
  enqueue(collective);
}

void Engine::enqueue(Collective& collective) {
  if (std::exchange(collective.queued, true)) return;
  ready_.push_back(&collective);
}

void Engine::dequeue(Collective& collective) {
  if (std::exchange(collective.queued, false)) std::erase(ready_, &collective);
  std::erase(blocked_, &collective);
  std::erase(finishing_, &collective);
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
  // The order of finishing_ does not matter, since collectives are independent.
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
      incoming_.erase(incoming_key(source, collective.headers[source]->serial));
  dequeue(collective);
  // Releases the transport's buffers while this thread has the role.
  collective.early.clear();
  if (status != CGX_OK && collective.sends) collective.sends->give_up();
  if (collective.missing_headers == 0)
    collective.headers.clear();  // otherwise headers are still
                                 // counted
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
    } catch (...) {  // callbacks must not throw, but waiters must see the end in any case
    }
    lock.lock();
  }
  // notify() checks for the end under the same lock, so it runs before this or after `done`.
  --in_flight_;
  if (!collective.announcement) --needed_;
  collective.done = true;
  changed_.notify_all();
}

// ---- messages ------------------------------------------------------------------------------

void Engine::on_control(int source, std::span<const std::byte> message) {
  std::visit([&](auto&& read) { take(source, std::move(read)); }, read_message(source, message));
}

// Returns the collective of a bulk message and checks its sequence. Null if the collective has
// ended here.
Collective* Engine::receiver(int source, Slot slot) {
  const uint32_t serial = slot.channel / 2, part = slot.channel % 2;
  const auto found = incoming_.find(incoming_key(source, serial));
  if (found == incoming_.end()) {
    const uint32_t age = (last_serial_[source] - serial) % kSerials;
    require(age < kSerials / 2, CGX_PEER_FAILED, "rank ", source,
            " sent a message of a collective without a header");
    return nullptr;
  }
  Incoming& incoming = found->second;
  uint32_t& next = incoming.next[part];
  require(slot.sequence == next, CGX_PEER_FAILED, "rank ", source, " sent message ", slot.sequence,
          " of collective ", incoming.collective->key, " where message ", next,
          " is due: one was lost, duplicated or reordered");
  next = (next + 1) % kSequences;
  return incoming.collective;
}

void Engine::on_bulk(Arrival arrival) {
  Collective* const collective = receiver(arrival.source, arrival.slot);
  if (collective == nullptr) return;
  const int part = static_cast<int>(arrival.slot.channel % 2);
  if (!collective->agreed) {
    collective->early.emplace_back(part, std::move(arrival));
    return;
  }
  collective->algorithm->deliver(part, std::move(arrival));
  enqueue(*collective);
}

void Engine::on_unreadable(int source, Slot slot, const Error& error) {
  Collective* const collective = receiver(source, slot);
  if (collective == nullptr) return;
  collective->shortage = error;
  if (collective->agreed) cancel(*collective);
}

}  // namespace cgx
