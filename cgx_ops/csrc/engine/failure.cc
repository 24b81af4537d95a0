// The engine in trouble.
//
//   cancel     one collective, for which this rank is short of something: on all ranks
//   inquiry    a deadline has passed: who is it that all wait for? Every member is asked for whom
//              it waits; a rank that stands still does not answer
//   fail_all   a passed deadline, a lost peer or nonsense ends everything, here and at the peers
#include <algorithm>

#include "base/bytes.h"
#include "base/status.h"
#include "engine/engine.h"

namespace cgx {
namespace {

constexpr auto kCheckInterval = std::chrono::milliseconds(20);  // deadlines, lost peers
constexpr Clock::duration kLongestInquiry = std::chrono::milliseconds(500);
constexpr size_t kLongestNews = 900;  // bytes that every transport carries

}  // namespace

// This rank cannot go on with it. Those that are done with it have the right values; the others
// end with this error. All headers are here, so nothing of it can be taken for another's.
void Engine::cancel(Collective& collective) {
  const cgx_status_t status = collective.shortage->status();
  const std::string reason = cut(join("rank ", rank_, " cannot go on with collective ",
                                      collective.key, ": ", collective.shortage->what()),
                                 kLongestNews);
  const Bytes message = write_cancel({collective.serial, {status, reason}});
  for (const int member : collective.members)
    if (member != rank_ && !lost_[member]) transport_->send_control(member, message);
  finish(collective, status, reason);
}

void Engine::take(int source, const Cancel& cancel) {
  const auto found = incoming_.find(incoming_key(source, cancel.serial));
  if (found == incoming_.end()) return;  // it has ended here
  Collective& collective = *found->second.collective;
  if (collective.agreed)
    finish(collective, cancel.reason.status, cancel.reason.message);
  else  // it ends with the last header
    collective.headers[source]->refused = cancel.reason;
}

bool Engine::waits_for(const Collective& collective, int rank) const {
  if (rank == rank_ || std::find(collective.members.begin(), collective.members.end(), rank) ==
                           collective.members.end())
    return false;
  return !collective.headers[rank] || (collective.agreed && collective.algorithm->waits_for(rank));
}

// A peer's loss ends nothing by itself: what it sent before it went has been delivered, and may be
// all that the collectives in flight need. Those that need more, now or later, find it missing; so
// do those that failed there.
void Engine::on_peer_lost(int rank, Loss how, const std::string& reason) {
  if (lost_[rank]) return;
  lost_[rank] = {how, reason};
  if (how != Loss::kLeft) peer_failed_ = true;
  if (how == Loss::kGaveUp) forget_early(rank);
  next_check_ = {};
  const std::lock_guard lock(mutex_);
  losses_ += join(losses_.empty() ? "" : "; ", loss_text(rank));
  peer_lost_ = true;
  changed_.notify_all();
}

// Who gave up has named the rank that it gave up for.
std::string Engine::loss_text(int rank) const {
  const auto& [how, reason] = *lost_[rank];
  return how == Loss::kGaveUp ? reason : join("rank ", rank, " is lost: ", reason);
}

void Engine::take(int source, const Abort& abort) {
  for (const uint32_t serial : abort.serials) {
    const auto found = incoming_.find(incoming_key(source, serial));
    if (found != incoming_.end()) retract(*found->second.collective, source);
  }
  on_peer_lost(source, Loss::kGaveUp, abort.reason);
}

// It has failed at its source, so it must not end well here, even if all values are here: as if it
// had not been announced, it waits for a rank that is lost.
void Engine::retract(Collective& collective, int source) {
  incoming_.erase(incoming_key(source, collective.headers[source]->serial));
  collective.headers[source].reset();
  ++collective.missing_headers;
  collective.agreed = false;
  dequeue(collective);
}

// The same for what this rank has not started: without it, they cannot have ended well there.
void Engine::forget_early(int source) {
  for (auto it = uses_.begin(); it != uses_.end();) {
    Uses& uses = it->second;
    std::erase_if(uses.early, [&](const auto& entry) { return entry.first == source; });
    it = uses.open.empty() && uses.early.empty() ? uses_.erase(it) : std::next(it);
  }
}

void Engine::check_waits() {
  next_check_ = now_ + kCheckInterval;
  for (const auto& [key, collective] : running_) {
    for (const int member : collective->members) {
      if (!lost_[member] || !waits_for(*collective, member)) continue;
      const bool told = lost_[member]->how == Loss::kGaveUp;
      fail_all(CGX_PEER_FAILED, loss_text(member), nullptr, told);
      return;
    }
    if (now_ < collective->deadline) continue;
    if (collective->agreed && collective->answers.empty()) {
      inquire(*collective);
      continue;
    }
    fail_all(CGX_TIMEOUT, describe_wait(*collective), collective.get());
    return;
  }
}

// ---- inquiry -------------------------------------------------------------------------------

// Who has not started it is known: it lacks a header. Else the deadline is put off for a moment.
void Engine::inquire(Collective& collective) {
  collective.answers.resize(size_);
  collective.deadline =
      now_ + std::min(kLongestInquiry,
                      std::chrono::duration_cast<Clock::duration>(collective.timeout / 4));
  const Bytes ask = write_ask({collective.serial});
  for (const int member : collective.members)
    if (member != rank_ && !lost_[member]) transport_->send_control(member, ask);
}

void Engine::take(int source, const Ask& ask) {
  Answer answer{ask.serial, {}};
  const auto found = incoming_.find(incoming_key(source, ask.serial));
  if (found != incoming_.end()) answer.waits_for = awaited(*found->second.collective);
  if (!lost_[source]) transport_->send_control(source, write_answer(answer));
}

void Engine::take(int source, Answer answer) {
  for (const auto& [key, collective] : running_)
    if (collective->serial == answer.serial && !collective->answers.empty())
      collective->answers[source] = std::move(answer.waits_for);
}

std::vector<int32_t> Engine::awaited(const Collective& collective) const {
  std::vector<int32_t> ranks;
  for (const int member : collective.members)
    if (waits_for(collective, member)) ranks.push_back(member);
  return ranks;
}

// Follows those that this rank waits for to those that they wait for, and so on. The end of such a
// chain is late: it does not answer, or waits for nobody.
std::set<int> Engine::late(const Collective& collective) const {
  std::set<int> late, seen{rank_};
  std::vector<int32_t> next = awaited(collective);
  while (!next.empty()) {
    const int rank = next.back();
    next.pop_back();
    if (rank < 0 || rank >= size_ || !seen.insert(rank).second) continue;
    const auto& answer = collective.answers[rank];
    if (!answer || answer->empty()) late.insert(rank);
    if (answer) next.insert(next.end(), answer->begin(), answer->end());
  }
  return late;
}

std::string Engine::describe_wait(const Collective& collective) const {
  std::string text =
      join("collective ", collective.key, " did not end within ", collective.timeout.count(), " s");
  if (collective.agreed) {
    std::set<int> blamed = late(collective);
    if (blamed.empty())  // all answer, and wait in a circle
      for (const int rank : awaited(collective)) blamed.insert(rank);
    for (const int rank : blamed)
      text += join("; rank ", rank,
                   collective.answers[rank] ? " is late in phase " : " does not answer in phase ",
                   collective.algorithm->phase());
    for (const int member : collective.members)
      if (collective.sends->unread_by(member))
        text += join("; rank ", member, " has not read what was sent to it");
    return text;
  }
  for (const int member : collective.members) {
    if (collective.headers[member]) continue;
    text += join("; rank ", member, " has not started it (phase header)");
    const auto other = std::find_if(uses_.begin(), uses_.end(), [&](const auto& each) {
      const auto& early = each.second.early;
      return std::any_of(early.begin(), early.end(),
                         [&](const auto& entry) { return entry.first == member; });
    });
    if (other != uses_.end()) text += join(", but has started ", other->first);
  }
  return text;
}

void Engine::tell_abort(const std::string& news) {
  std::vector<uint32_t> serials;
  for (const auto& [key, collective] : running_) serials.push_back(collective->serial);
  do {
    const size_t rest = serials.size() - std::min(serials.size(), kMostAborted);
    const Bytes abort = write_abort({news, {serials.begin() + rest, serials.end()}});
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank_ && !lost_[peer]) transport_->send_control(peer, abort);
    serials.resize(rest);
  } while (!serials.empty());
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
      cut(told ? reason : join("rank ", rank_, " gave up: ", reason), kLongestNews);
  try {
    tell_abort(news);
  } catch (const std::exception&) {  // the transport may be what failed; leave() tells them too
  }
  while (!running_.empty()) {
    Collective& collective = *running_.begin()->second;
    std::string text = join("communicator '", name_, "', rank ", rank_, ": ", reason);
    if (&collective != cause) {
      text += join(" [while collective ", collective.key, " was in phase ",
                   collective.agreed ? collective.algorithm->phase() : "header", "]");
    }
    finish(collective, status, std::move(text));
  }
  uses_.clear();
  try {
    transport_->leave(false, news);
  } catch (const std::exception&) {  // peers find out at their deadline
  }
}

}  // namespace cgx
