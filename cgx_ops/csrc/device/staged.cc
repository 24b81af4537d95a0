#include "device/staged.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "algorithm/relay.h"
#include "base/status.h"
#include "device/agree.h"
#include "device/failures.h"

namespace cgx::device {
namespace {

constexpr int kLanes = 3;
constexpr int64_t kMostSlotBytes = 1 << 20;
constexpr int64_t kLaneBytes = 32 << 20;  // limit for all slots of a lane together

// The first relay of a call checks that ranks agree. Later relays of the call wait for it: ranks
// that disagree may have more relays than their peers, and would wait for these until the deadline.
class Agreeing {
 public:
  explicit Agreeing(const Call& call) : call(call) {}
  // Calls start(context), immediately or when the first relay has ended.
  void then(void (*start)(void* context), void* context) {
    {
      const std::lock_guard lock(mutex_);
      if (!over_) {
        waiting_.emplace_back(start, context);
        return;
      }
    }
    start(context);
  }
  void end() {
    std::vector<std::pair<void (*)(void*), void*>> ready;
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
      ready.swap(waiting_);
    }
    for (const auto& [start, context] : ready) start(context);
  }

  const Call call;

 private:
  std::mutex mutex_;
  bool over_ = false;
  std::vector<std::pair<void (*)(void*), void*>> waiting_;
};

// An exchange on the host, from the device's call to the end of the relay.
struct Relaying {
  HostLink& host;
  std::shared_ptr<Failures> failures;
  std::shared_ptr<Agreeing> agreeing;
  bool first;  // of its call
  std::string what;
  std::unique_ptr<Relay> relay;
  uint32_t* ended;  // counts the lane's relays

  // Called by the device.
  static void begin(void* context) {
    const auto* self = static_cast<Relaying*>(context);
    const auto agreeing = self->agreeing;
    self->first ? start(context) : agreeing->then(start, context);
  }
  static void start(void* context) {
    auto* self = static_cast<Relaying*>(context);
    if (self->failures->first()) return finish(context, CGX_OK, "");  // the collective has failed
    const Call& call = self->agreeing->call;
    try {
      self->host.start(std::move(self->relay), self->what, call.number, call.agreement,
                       call.timeout, finish, context);
    } catch (const Error& error) {
      finish(context, error.status(), error.what());
    } catch (const std::exception& error) {
      finish(context, CGX_INTERNAL, error.what());
    }
  }
  static void finish(void* context, cgx_status_t status, const char* message) {
    std::unique_ptr<Relaying> self(static_cast<Relaying*>(context));
    // close() waits for relays, so an engine is closed here because a collective has failed.
    if (status == CGX_CLOSED) status = CGX_PEER_FAILED;
    if (status != CGX_OK) self->failures->add(status, message);
    const auto agreeing = self->first ? self->agreeing : nullptr;
    uint32_t* const ended = self->ended;
    self.reset();  // before the device, and with it the wire, continues
    std::atomic_ref(*ended).fetch_add(1, std::memory_order_release);
    if (agreeing) agreeing->end();
  }
};

class StagedLane final : public Lane {
 public:
  StagedLane(Device& device, HostLink& host, int number, int64_t slot_bytes,
             std::shared_ptr<Failures> failures)
      : host_(host),
        number_(number),
        slot_bytes_(slot_bytes),
        failures_(std::move(failures)),
        queue_(device.make_queue()),
        end_(device.make_event()),
        outgoing_(device.allocate(slots_bytes(), Place::kDevice)),
        arrived_(device.allocate(slots_bytes(), Place::kDevice)),
        pinned_outgoing_(device.allocate(slots_bytes(), Place::kPinned)),
        pinned_arrived_(device.allocate(slots_bytes(), Place::kPinned)),
        ended_(device.allocate(sizeof(uint32_t), Place::kPinned)),
        fault_(device.allocate(sizeof(uint32_t), Place::kDevice)) {}

  // The first round of a call on this lane waits for `begin`.
  void begin(std::shared_ptr<Agreeing> agreeing, const Event& begin) {
    agreeing_ = std::move(agreeing);
    exchanges_ = 0;
    queue_->wait_for(begin);
  }
  void end(Queue& caller) {
    queue_->record(*end_);
    caller.wait_for(*end_);
  }

  Queue& queue() override { return *queue_; }
  const uint32_t* fault() const override { return reinterpret_cast<const uint32_t*>(fault_.get()); }

  // A message for all is written to this rank's arrival slot, so that this rank has it, too.
  Slots slots(Traffic traffic) override {
    Slots slots{{}, arrived_.get(), slot_bytes_};
    for (int peer = 0; peer < host_.size(); ++peer)
      slots.to.push_back(traffic == Traffic::kAll ? arrived_.get() + at(host_.rank())
                                                  : outgoing_.get() + at(peer));
    return slots;
  }

  void exchange(Traffic traffic, std::span<const int64_t> sent,
                std::span<const int64_t> received) override {
    const bool one_message = traffic == Traffic::kAll;
    const Slots from = slots(traffic);
    std::vector<std::span<const std::byte>> outgoing(host_.size());
    std::vector<std::span<std::byte>> incoming(host_.size());
    bool copied = false;
    for (int peer = 0; peer < host_.size(); ++peer) {
      if (peer == host_.rank()) continue;
      std::byte* to = pinned_outgoing_.get() + (one_message ? 0 : at(peer));
      if (!(one_message && copied) && sent[peer] > 0) {
        queue_->copy(to, from.to[peer], sent[peer]);
        copied = true;
      }
      outgoing[peer] = {to, static_cast<size_t>(sent[peer])};
      incoming[peer] = {pinned_arrived_.get() + at(peer), static_cast<size_t>(received[peer])};
    }
    auto* ended = reinterpret_cast<uint32_t*>(ended_.get());
    const bool first = number_ == 0 && exchanges_ == 0;
    auto relaying = std::make_unique<Relaying>(
        Relaying{host_, failures_, agreeing_, first,
                 join("relay ", number_, ".", exchanges_++, " of a device"),
                 std::make_unique<Relay>(host_.rank(), outgoing, incoming), ended});
    queue_->call(Relaying::begin, relaying.get());
    relaying.release();  // owned by finish() now
    queue_->wait_for(ended, ++relays_);
    for (int peer = 0; peer < host_.size(); ++peer)
      if (!incoming[peer].empty())
        queue_->copy(arrived_.get() + at(peer), incoming[peer].data(), incoming[peer].size());
    queue_->copy(fault_.get(), failures_->word(), sizeof(uint32_t));
  }

 private:
  int64_t slots_bytes() const { return slot_bytes_ * host_.size(); }
  int64_t at(int rank) const { return rank * slot_bytes_; }

  HostLink& host_;
  const int number_;
  const int64_t slot_bytes_;
  const std::shared_ptr<Failures> failures_;
  const std::unique_ptr<Queue> queue_;
  const std::unique_ptr<Event> end_;  // of the last call
  const Memory outgoing_, arrived_, pinned_outgoing_, pinned_arrived_;
  const Memory ended_;  // number of ended relays, written by the host
  const Memory fault_;
  uint32_t relays_ = 0;                 // enqueued so far
  std::shared_ptr<Agreeing> agreeing_;  // the call's
  int exchanges_ = 0;                   // of this call
};

class Staged final : public Wire {
 public:
  Staged(Device& device, HostLink& host)
      : slot_bytes_(slot_bytes_for(kMostSlotBytes, kLaneBytes, host.size())),
        failures_(std::make_shared<Failures>(device.allocate(sizeof(uint32_t), Place::kPinned))),
        begin_(device.make_event()) {
    for (int number = 0; number < kLanes; ++number)
      lanes_.push_back(std::make_unique<StagedLane>(device, host, number, slot_bytes_, failures_));
  }

  const char* name() const override { return "staged"; }
  int64_t slot_bytes() const override { return slot_bytes_; }
  bool recordable() const override { return false; }
  Regions regions() const override { return {nullptr, 0}; }

  void begin(const Call& call, Queue& caller) override {
    agreeing_ = std::make_shared<Agreeing>(call);
    used_ = 0;
    caller.record(*begin_);
  }
  Lane& lane(int64_t round) override {
    if (round == used_ && used_ < kLanes) lanes_[used_++]->begin(agreeing_, *begin_);
    return *lanes_[round % kLanes];
  }
  void end(Queue& caller) override {
    for (int lane = 0; lane < used_; ++lane) lanes_[lane]->end(caller);
  }

  std::optional<Failure> failure() override { return failures_->first(); }
  void close(std::chrono::duration<double>) override {}  // shares nothing

 private:
  const int64_t slot_bytes_;
  const std::shared_ptr<Failures> failures_;
  std::vector<std::unique_ptr<StagedLane>> lanes_;
  // The collective that is being enqueued:
  const std::unique_ptr<Event> begin_;
  std::shared_ptr<Agreeing> agreeing_;
  int used_ = 0;  // number of lanes
};

}  // namespace

std::unique_ptr<Wire> connect_staged(Device& device, HostLink& host,
                                     std::chrono::duration<double> timeout, std::string* why) {
  std::unique_ptr<Wire> wire;
  std::vector<Bytes> nothing;
  const auto allocate = [&] {
    wire = std::make_unique<Staged>(device, host);
    return Bytes();
  };
  if (!all_succeed(host, "device staging", timeout, allocate, &nothing, why)) return nullptr;
  return wire;
}

}  // namespace cgx::device
