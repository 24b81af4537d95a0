#include "rendezvous.h"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>
#include <utility>

#include "cgx/completion_pool.h"
#include "core.h"
#include "groups.h"

namespace cgx::xla {
namespace {

using Clock = std::chrono::steady_clock;

// Fails rendezvous at their deadlines. All have the same timeout, so they expire in order.
class Deadlines {
 public:
  static Deadlines& Get() {
    static auto* deadlines = new Deadlines;  // never destroyed, since its thread uses it
    return *deadlines;
  }

  void Add(Clock::time_point when, std::weak_ptr<Rendezvous> rendezvous) {
    std::lock_guard lock(mutex_);
    while (!waiting_.empty() && waiting_.front().rendezvous.expired()) waiting_.pop_front();
    waiting_.push_back({when, std::move(rendezvous)});
    if (waiting_.size() == 1) changed_.notify_one();
  }

 private:
  struct Entry {
    Clock::time_point when;
    std::weak_ptr<Rendezvous> rendezvous;
  };

  Deadlines() {
    std::thread([this] { Loop(); }).detach();
  }

  void Loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !waiting_.empty(); });
      const Entry first = waiting_.front();
      if (!first.rendezvous.expired() && Clock::now() < first.when) {
        changed_.wait_until(lock, first.when);
        continue;
      }
      waiting_.pop_front();
      lock.unlock();
      if (auto rendezvous = first.rendezvous.lock()) rendezvous->Expire();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> waiting_;
};

std::unique_ptr<std::byte[]> Buffer(int64_t bytes) {
  return std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(bytes));
}

// Sums `numel` values of each call, which start at `values_of(call)`.
void Sum(const std::vector<std::shared_ptr<Call>>& calls,
         const std::function<const std::byte*(const Call&)>& values_of, int64_t numel,
         std::byte* sums) {
  std::vector<const void*> values;
  for (const auto& call : calls) values.push_back(values_of(*call));
  check(cgx_sum(calls[0]->dtype(), values.data(), static_cast<int32_t>(values.size()), numel,
                reinterpret_cast<float*>(sums)));
}

// The members of a process are one rank, so their blocks need separate seeds, even with the same
// key. Seeds are random numbers, so seed + place does not collide with another seed.
void AddSeeds(const Call& call, int64_t place, Message* message) {
  for (const int64_t seed : call.seeds())
    message->seeds.push_back(static_cast<int64_t>(static_cast<uint64_t>(seed) + place));
}

}  // namespace

std::shared_ptr<Rendezvous> Rendezvous::Open(const Site& site, const Group& group, int64_t process,
                                             int64_t run, double timeout_s) {
  std::shared_ptr<Rendezvous> rendezvous(new Rendezvous(site, group, process, run, timeout_s));
  const auto wait = std::chrono::duration<double>(timeout_s);
  Deadlines::Get().Add(Clock::now() + std::chrono::duration_cast<Clock::duration>(wait),
                       rendezvous);
  return rendezvous;
}

Rendezvous::Rendezvous(const Site& site, const Group& group, int64_t process, int64_t run,
                       double timeout_s)
    : site_(site),
      group_(group),
      process_(process),
      run_(run),
      timeout_s_(timeout_s),
      calls_(group.members_of[process].size()) {}

bool Rendezvous::Join(int64_t place, std::shared_ptr<Call> call) {
  std::unique_lock lock(mutex_);
  if (failed_ != CGX_OK) {
    lock.unlock();
    CompleteSoon(call, failed_, why_);
    return false;
  }
  calls_[place] = std::move(call);
  if (++joined_ < calls_.size()) return false;
  lock.unlock();
  CompletionPool::get().run([self = shared_from_this()] { self->Run(); });
  return true;
}

void Rendezvous::Fail(cgx_status_t status, const std::string& text) {
  std::vector<std::shared_ptr<Call>> calls;
  {
    std::lock_guard lock(mutex_);
    if (failed_ != CGX_OK || joined_ == calls_.size()) return;
    failed_ = status;
    why_ = text;
    calls = std::move(calls_);
  }
  Refuse(group_.processes, site_.NameOf(group_), status, text);
  for (auto& call : calls)
    if (call) CompleteSoon(call, status, text);
}

// Called by the thread of Deadlines. Site and group live only as long as one of their calls, so
// this must not use them unless calls of this rendezvous are waiting, which Fail() checks.
void Rendezvous::Expire() {
  char text[128];
  {
    std::lock_guard lock(mutex_);
    std::snprintf(text, sizeof(text),
                  "%zu of %zu devices of this process did not call it within %g s",
                  calls_.size() - joined_, calls_.size(), timeout_s_);
  }
  Fail(CGX_TIMEOUT, text);
}

// From here on, all devices have joined, and calls_ does not change.

void Rendezvous::Run() {
  std::shared_ptr<Message> message;
  try {
    const Verb& verb = site_.signature().verb;
    message = verb.exchanges() ? Exchange()
              : !verb.reduces  ? Gather()
              : verb.blocks_in ? ReduceScatter()
                               : ReduceAll();
  } catch (const std::exception& error) {
    Refuse(group_.processes, site_.NameOf(group_), StatusOf(error), error.what());
    End(StatusOf(error), error.what());
    return;
  }
  message->fields.timeout_s = timeout_s_;
  message->fields.launch = static_cast<int32_t>(run_);
  message->noise_rank = static_cast<int32_t>(process_);  // a process is a rank
  auto self = shared_from_this();
  WithProcessCommunicator(group_.processes, [self, message](int32_t comm, cgx_status_t status,
                                                            const std::string& text) {
    if (status != CGX_OK) return self->End(status, text);
    Start(*message, comm,
          [self](cgx_status_t ended, const std::string& why) { self->End(ended, why); });
  });
}

std::shared_ptr<Message> Rendezvous::NewMessage(int32_t dtype) const {
  const Signature& signature = site_.signature();
  auto message = std::make_shared<Message>(
      MakeCall(signature.verb, signature.op, signature.configs, site_.NameOf(group_)));
  message->fields.dtype = dtype;
  message->fields.divisor = static_cast<int64_t>(group_.members.size());
  return message;
}

std::shared_ptr<Message> Rendezvous::ReduceAll() {
  auto message = NewMessage(CGX_FLOAT32);
  const std::vector<Leaf>& leaves = calls_[0]->leaves();
  int64_t bytes = 0;
  for (const Leaf& leaf : leaves) bytes += 4 * leaf.elements();
  sent_ = Buffer(bytes);
  if (site_.signature().feedback) residual_ = Buffer(bytes);
  int64_t at = 0;
  for (size_t i = 0; i < leaves.size(); ++i) {
    Leaf whole = leaves[i];
    whole.values = whole.result = sent_.get() + at;
    const auto values = [i](const Call& call) { return call.leaves()[i].values; };
    const auto residual = [i](const Call& call) { return call.leaves()[i].residual; };
    Sum(calls_, values, whole.elements(), whole.result);
    if (whole.residual) {
      whole.residual = residual_.get() + at;
      Sum(calls_, residual, whole.elements(), whole.residual);
    }
    AddLeaf(whole, site_.signature().feedback, message.get());
    at += 4 * whole.elements();
  }
  message->seeds = calls_[0]->seeds();
  return message;
}

// A block of the message, for one process, holds the blocks of that process's members, in order.
std::shared_ptr<Message> Rendezvous::ReduceScatter() {
  auto message = NewMessage(CGX_FLOAT32);
  const Leaf& leaf = calls_[0]->leaves()[0];
  const auto locals = static_cast<int64_t>(calls_.size());
  const int64_t block = leaf.elements();
  sent_ = Buffer(4 * block * static_cast<int64_t>(group_.members.size()));
  received_ = Buffer(4 * block * locals);
  std::byte* to = sent_.get();
  for (const auto& members : group_.members_of) {
    for (const int64_t rank : members) {
      const int64_t from = rank * block * SizeOf(calls_[0]->dtype());
      Sum(calls_, [from](const Call& call) { return call.leaves()[0].values + from; }, block, to);
      to += 4 * block;
    }
  }
  for (int64_t place = 0; place < locals; ++place) {
    AddSegments(leaf, message.get());
    AddSeeds(*calls_[0], place, message.get());
  }
  message->fields.input = sent_.get();
  message->fields.output = received_.get();
  message->fields.block_numel = block * locals;
  return message;
}

std::shared_ptr<Message> Rendezvous::Gather() {
  const int32_t dtype = calls_[0]->dtype();
  auto message = NewMessage(dtype);
  const int64_t block = calls_[0]->leaves()[0].elements(), bytes = block * SizeOf(dtype);
  const auto locals = static_cast<int64_t>(calls_.size());
  sent_ = Buffer(bytes * locals);
  received_ = Buffer(bytes * static_cast<int64_t>(group_.members.size()));
  for (int64_t place = 0; place < locals; ++place) {
    const Leaf& leaf = calls_[place]->leaves()[0];
    std::memcpy(sent_.get() + place * bytes, leaf.values, bytes);
    AddSegments(leaf, message.get());
    AddSeeds(*calls_[place], place, message.get());
  }
  message->fields.input = sent_.get();
  message->fields.output = received_.get();
  message->fields.block_numel = block * locals;
  return message;
}

// The block for a process holds, for each of its members, a block from each member of this process.
// The core copies the own block exactly.
std::shared_ptr<Message> Rendezvous::Exchange() {
  const int32_t dtype = calls_[0]->dtype();
  auto message = NewMessage(dtype);
  const int64_t block = calls_[0]->leaves()[0].elements(), bytes = block * SizeOf(dtype);
  const auto locals = static_cast<int64_t>(calls_.size());
  const auto members = static_cast<int64_t>(group_.members.size());
  sent_ = Buffer(bytes * locals * members);
  received_ = Buffer(bytes * locals * members);
  std::byte* to = sent_.get();
  for (const auto& receivers : group_.members_of) {
    for (const int64_t receiver : receivers) {
      for (const auto& call : calls_) {
        std::memcpy(to, call->leaves()[0].values + receiver * bytes, bytes);
        to += bytes;
      }
    }
  }
  for (int64_t pair = 0; pair < locals * locals; ++pair) {
    const Call& sender = *calls_[pair % locals];
    AddSegments(sender.leaves()[0], message.get());
    AddSeeds(sender, pair, message.get());
  }
  message->fields.input = sent_.get();
  message->fields.output = received_.get();
  message->fields.block_numel = block * locals * locals;
  return message;
}

void Rendezvous::End(cgx_status_t status, const std::string& text) {
  for (size_t place = 0; place < calls_.size(); ++place) {
    CompletionPool::get().run([self = shared_from_this(), place, status, text] {
      cgx_status_t ended = status;
      std::string why = text;
      try {
        if (status == CGX_OK) self->Deliver(static_cast<int64_t>(place));
      } catch (const std::exception& error) {
        ended = StatusOf(error);
        why = error.what();
      }
      // The last task frees the buffers. The call must not outlive its promise.
      self->calls_[place]->Complete(ended, why);
    });
  }
}

void Rendezvous::Deliver(int64_t place) {
  const Call& call = *calls_[place];
  const int64_t width = SizeOf(call.dtype());
  const Leaf& first = call.leaves()[0];
  const Verb& verb = site_.signature().verb;
  if (!verb.reduces) {
    const int64_t bytes = first.elements() * width;
    const auto locals = static_cast<int64_t>(calls_.size());
    for (size_t rank = 0; rank < group_.members.size(); ++rank) {
      const int64_t sender = group_.place_of[rank];
      const int64_t from = verb.exchanges()
                               ? (group_.process_of[rank] * locals + place) * locals + sender
                               : group_.process_of[rank] * locals + sender;
      std::memcpy(first.result + static_cast<int64_t>(rank) * bytes, received_.get() + from * bytes,
                  bytes);
    }
    return;
  }
  if (verb.blocks_in) {
    check(cgx_convert(CGX_FLOAT32, received_.get() + 4 * place * first.elements(), call.dtype(),
                      first.result, first.elements()));
    return;
  }
  int64_t at = 0;
  for (const Leaf& leaf : call.leaves()) {
    check(cgx_convert(CGX_FLOAT32, sent_.get() + at, call.dtype(), leaf.result, leaf.elements()));
    // One device gets the residual of all, so that it is added only once.
    if (leaf.residual && place == 0)
      check(cgx_convert_residual(reinterpret_cast<const float*>(residual_.get() + at), call.dtype(),
                                 leaf.residual, leaf.elements()));
    else if (leaf.residual)
      std::memset(leaf.residual, 0, leaf.elements() * width);
    at += 4 * leaf.elements();
  }
}

}  // namespace cgx::xla
