// Failure handling of the engine.
//
//   cancel     ends one collective on all ranks, because this rank lacks a resource for it
//   inquiry    after a deadline: asks every member which ranks it waits for, to find the rank that
//              delays all. A stopped rank does not answer.
//   drop       ends one announcement on this rank: the other rank is lost, or this one leaves
//   fail_all   a missed deadline, a lost peer or a malformed message ends all collectives, here and
//              on the peers
#include <algorithm>

#include "base/bytes.h"
#include "base/status.h"
#include "engine/engine.h"

namespace cgx {
namespace {

constexpr auto kCheckInterval = std::chrono::milliseconds(20);  // for deadlines and lost peers
constexpr Clock::duration kLongestInquiry = std::chrono::milliseconds(500);
constexpr size_t kLongestReason = 900;  // bytes; every transport accepts this length

}  // namespace

// Members that have finished have correct results; all others end with this error. All headers have
// arrived, so later messages cannot be confused with those of another collective.
void Engine::cancel(Collective& collective) {
  const cgx_status_t status = collective.shortage->status();
  const std::string reason = cut(join("rank ", rank_, " cannot go on with collective ",
                                      collective.key, ": ", collective.shortage->what()),
                                 kLongestReason);
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
  else  // ends when the last header arrives
    collective.headers[source]->refused = cancel.reason;
}

bool Engine::waits_for(const Collective& collective, int rank) const {
  if (rank == rank_ || std::find(collective.members.begin(), collective.members.end(), rank) ==
                           collective.members.end())
    return false;
  return !collective.headers[rank] || (collective.agreed && collective.algorithm->waits_for(rank));
}

// The loss of a peer alone ends nothing: its earlier messages have been delivered, and may be all
// that the collectives in flight need. Those that need more will fail, as will those that failed on
// the peer.
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

// The reason of a peer that gave up names the lost rank already.
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

// The collective has failed on its source, so it must not succeed here even if all values have
// arrived. Treats it as not announced by that rank, so that it waits for a lost rank.
void Engine::retract(Collective& collective, int source) {
  incoming_.erase(incoming_key(source, collective.headers[source]->serial));
  collective.headers[source].reset();
  ++collective.missing_headers;
  collective.agreed = false;
  dequeue(collective);
}

// The same for collectives that have not started here: without this rank they cannot have succeeded
// on the source.
void Engine::forget_early(int source) {
  for (auto it = uses_.begin(); it != uses_.end();) {
    Uses& uses = it->second;
    std::erase_if(uses.early, [&](const auto& entry) { return entry.first == source; });
    it = uses.open.empty() && uses.early.empty() ? uses_.erase(it) : std::next(it);
  }
}

void Engine::check_waits() {
  next_check_ = now_ + kCheckInterval;
  for (auto next = running_.begin(); next != running_.end();) {
    Collective& collective = *(next++)->second;
    if (const auto member = lost_member(collective)) {
      if (collective.announcement) {
        drop(collective, CGX_PEER_FAILED, loss_text(*member));
        continue;
      }
      const bool from_peer = lost_[*member]->how == Loss::kGaveUp;
      fail_all(CGX_PEER_FAILED, loss_text(*member), nullptr, from_peer);
      return;
    }
    if (now_ < collective.deadline) continue;
    if (collective.agreed && collective.answers.empty()) {
      inquire(collective);
      continue;
    }
    fail_all(CGX_TIMEOUT, describe_wait(collective), &collective);
    return;
  }
}

std::optional<int> Engine::lost_member(const Collective& collective) const {
  for (const int member : collective.members)
    if (lost_[member] && waits_for(collective, member)) return member;
  return std::nullopt;
}

// The other rank can go on: it has this rank's header. No header from there may match this call
// later.
void Engine::drop(Collective& announcement, cgx_status_t status, const std::string& reason) {
  if (const auto found = uses_.find(announcement.key); found != uses_.end()) {
    auto& [open, early] = found->second;
    std::erase_if(open, [&](const auto& each) { return each.get() == &announcement; });
    if (open.empty() && early.empty()) uses_.erase(found);
  }
  finish(announcement, status, join("communicator '", name_, "', rank ", rank_, ": ", reason));
}

void Engine::drop_announcements(const std::string& reason) {
  for (auto next = running_.begin(); next != running_.end();) {
    Collective& collective = *(next++)->second;
    if (collective.announcement) drop(collective, CGX_CLOSED, reason);
  }
}

// ---- inquiry -------------------------------------------------------------------------------

// Extends the deadline by a moment. Not needed for ranks that have not started: their headers are
// missing.
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

// Follows the ranks that this rank waits for to those that they wait for, transitively. The ends of
// these chains are late: they do not answer, or wait for no rank.
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
    if (blamed.empty())  // all answer, and wait in a cycle
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

void Engine::send_abort(const std::string& message) {
  std::vector<uint32_t> serials;
  for (const auto& [key, collective] : running_) serials.push_back(collective->serial);
  do {
    const size_t rest = serials.size() - std::min(serials.size(), kMostAborted);
    const Bytes abort = write_abort({message, {serials.begin() + rest, serials.end()}});
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank_ && !lost_[peer]) transport_->send_control(peer, abort);
    serials.resize(rest);
  } while (!serials.empty());
}

void Engine::fail_all(cgx_status_t status, const std::string& reason, Collective* cause,
                      bool from_peer) {
  {
    const std::lock_guard lock(mutex_);
    if (failed_.exchange(true)) return;
    closed_ = true;
    close_reason_ = reason;
  }
  // Notify peers first: their collectives wait for this rank. Reasons from peers are passed on
  // unchanged.
  const std::string message =
      cut(from_peer ? reason : join("rank ", rank_, " gave up: ", reason), kLongestReason);
  try {
    send_abort(message);
  } catch (const std::exception&) {  // the transport itself may have failed; leave() notifies
                                     // peers, too
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
    transport_->leave(false, message);
  } catch (const std::exception&) {  // peers time out
  }
}

}  // namespace cgx
