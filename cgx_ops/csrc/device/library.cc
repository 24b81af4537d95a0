#include "device/library.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include "algorithm/relay.h"
#include "base/status.h"
#include "device/agree.h"
#include "device/failures.h"

namespace cgx::device {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr int64_t kMostSlotBytes = 8 << 20;
constexpr int64_t kLaneBytes = 64 << 20;                     // limit for all slots together
constexpr auto kLookEvery = std::chrono::milliseconds(100);  // interval of polls for peers that the
                                                             // library has lost
constexpr auto kLinger = std::chrono::seconds(2);            // how long to wait for peers that
                                                             // close later

std::string title(const Call& call) {
  return join("device collective ", title_of(call.name, call.number));
}

// Enforces deadlines of work on the device. Collectives share one queue, so the first that has not
// ended is running.
class Watch {
 public:
  Watch(Fabric& fabric, Memory word) : fabric_(fabric), failures_(std::move(word)) {}
  ~Watch() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  const Failures& failures() const { return failures_; }

  void put_begin(const Call& call, Queue& queue) {
    {
      const std::lock_guard lock(mutex_);
      calls_.push_back({title(call), call.timeout});
      if (!thread_.joinable()) thread_ = std::thread([this] { watch(); });
    }
    queue.call([](void* self) { static_cast<Watch*>(self)->begun(); }, this);
  }
  void put_end(Queue& queue) {
    queue.call([](void* self) { static_cast<Watch*>(self)->ended(); }, this);
  }

  // Sets the word before the abort: work that continues because of the abort must see it.
  void fail(cgx_status_t status, const std::string& text) {
    failures_.add(status, text);
    fabric_.abort();
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Watched {
    std::string title;
    Seconds timeout;
  };

  // Called by the queue.
  void begun() {
    const std::lock_guard lock(mutex_);
    deadline_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(calls_.front().timeout);
    changed_.notify_all();
  }
  void ended() {
    const std::lock_guard lock(mutex_);
    deadline_.reset();
    calls_.pop_front();
  }

  void watch() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stop_ || deadline_; });
      if (stop_) return;
      const Watched& call = calls_.front();
      if (Clock::now() >= *deadline_) {
        const std::string text =
            join(call.title, ": messages did not arrive within ", call.timeout.count(),
                 " s on the GPU: a rank is lost or has stopped");
        lock.unlock();
        return fail(CGX_TIMEOUT, text);
      }
      const std::string what = call.title;
      lock.unlock();
      try {
        fabric_.check();
      } catch (const Error& error) {
        return fail(error.status(), join(what, ": ", error.what()));
      }
      lock.lock();
      if (!deadline_) continue;
      const auto next_look = std::min(*deadline_, Clock::now() + kLookEvery);
      changed_.wait_until(lock, next_look, [this] { return stop_; });
    }
  }

  Fabric& fabric_;
  Failures failures_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Watched> calls_;                  // on the queue
  std::optional<Clock::time_point> deadline_;  // of the first one, if it has begun
  bool stop_ = false;
  std::thread thread_;
};

class Library final : public Wire, private Lane {
 public:
  Library(const char* name, std::unique_ptr<Fabric> fabric, Device& device, HostLink& host)
      : name_(name),
        host_(host),
        slot_bytes_(slot_bytes_for(kMostSlotBytes, kLaneBytes, 2 * host.size())),
        fabric_(std::move(fabric)),
        watch_(*fabric_, device.allocate(sizeof(uint32_t), Place::kPinned)),
        outgoing_(device.allocate(slot_bytes_ * host.size(), Place::kDevice)),
        arrived_(device.allocate(slot_bytes_ * host.size(), Place::kDevice)),
        fault_(device.allocate(sizeof(uint32_t), Place::kDevice)),
        queue_(device.make_queue()),
        begin_(device.make_event()),
        end_(device.make_event()) {}

  Fabric& fabric() { return *fabric_; }

  // ---- Wire ----

  const char* name() const override { return name_; }
  int64_t slot_bytes() const override { return slot_bytes_; }
  bool recordable() const override { return false; }
  Regions regions() const override { return {nullptr, 0}; }

  void begin(const Call& call, Queue& caller) override {
    agree(call);
    title_ = title(call);
    timeout_ = call.timeout;
    caller.record(*begin_);
    queue_->wait_for(*begin_);
    if (fabric_->waits_on_device()) watch_.put_begin(call, *queue_);
  }
  Lane& lane(int64_t) override { return *this; }
  void end(Queue& caller) override {
    if (fabric_->waits_on_device()) watch_.put_end(*queue_);
    queue_->record(*end_);
    caller.wait_for(*end_);
    if (!refused_) return;
    const Failure first = *failure();
    fail(first.status, first.text);
  }

  std::optional<Failure> failure() override { return watch_.failures().first(); }
  void close(Seconds at_most) override {
    try {
      queue_->synchronize();
      if (failure()) return;  // aborted
      fabric_->close(std::min<Seconds>(at_most, kLinger));
    } catch (const Error&) {  // peers or the device are lost; the destructor aborts
    }
  }

 private:
  // An empty relay ends when all ranks have started it, and fails if they differ.
  void agree(const Call& call) {
    auto promise = std::make_unique<std::promise<Failure>>();
    auto ended = promise->get_future();
    const std::vector<std::span<const std::byte>> nothing_sent(host_.size());
    const std::vector<std::span<std::byte>> nothing_received(host_.size());
    host_.start(
        std::make_unique<Relay>(host_.rank(), nothing_sent, nothing_received),
        "agreement of devices", call.number, call.agreement, call.timeout,
        [](void* context, cgx_status_t status, const char* message) {
          const std::unique_ptr<std::promise<Failure>> promise(
              static_cast<std::promise<Failure>*>(context));
          promise->set_value({status, message});
        },
        promise.get());
    promise.release();                    // owned by the callback now
    const Failure outcome = ended.get();  // bounded by the deadline
    require(outcome.status == CGX_OK, outcome.status, title(call), ": ", outcome.text);
  }

  // A rank's slot. It keeps the memory of all slots alive.
  Memory outgoing(int rank) const { return {outgoing_, outgoing_.get() + rank * slot_bytes_}; }
  Memory arrived(int rank) const { return {arrived_, arrived_.get() + rank * slot_bytes_}; }
  Memory written(Traffic traffic, int peer) const {
    return traffic == Traffic::kAll ? arrived(host_.rank()) : outgoing(peer);
  }

  // ---- Lane ----

  Queue& queue() override { return *queue_; }
  const uint32_t* fault() const override { return reinterpret_cast<const uint32_t*>(fault_.get()); }

  // A message for all is written to this rank's arrival slot, so that this rank has it, too.
  Slots slots(Traffic traffic) override {
    Slots slots{{}, arrived_.get(), slot_bytes_};
    for (int peer = 0; peer < host_.size(); ++peer)
      slots.to.push_back(written(traffic, peer).get());
    return slots;
  }

  // Continues after a failure with the fault word set, so that later work writes NaN.
  void exchange(Traffic traffic, std::span<const int64_t> sent,
                std::span<const int64_t> received) override {
    std::vector<Fabric::Message> out, in;
    for (int peer = 0; peer < host_.size(); ++peer) {
      if (peer == host_.rank()) continue;
      if (sent[peer] > 0)
        out.push_back({peer, written(traffic, peer), static_cast<size_t>(sent[peer])});
      if (received[peer] > 0)
        in.push_back({peer, arrived(peer), static_cast<size_t>(received[peer])});
    }
    try {
      if (!out.empty() || !in.empty()) fabric_->exchange(out, in, *queue_, timeout_);
    } catch (const Error& error) {
      refused_ = true;
      watch_.fail(error.status(), join(title_, ": ", error.what()));
    }
    queue_->copy(fault_.get(), watch_.failures().word(), sizeof(uint32_t));
  }

  const char* const name_;
  HostLink& host_;
  const int64_t slot_bytes_;
  const std::unique_ptr<Fabric> fabric_;
  Watch watch_;
  const Memory outgoing_, arrived_, fault_;
  const std::unique_ptr<Queue> queue_;
  const std::unique_ptr<Event> begin_, end_;  // of the last collective
  // The collective that is being enqueued:
  std::string title_;
  Seconds timeout_{0};
  bool refused_ = false;  // an exchange has failed
};

}  // namespace

std::unique_ptr<Wire> connect_library(const char* name,
                                      const std::function<std::unique_ptr<Fabric>()>& make_fabric,
                                      Device& device, HostLink& host,
                                      std::chrono::duration<double> timeout, std::string* why) {
  std::unique_ptr<Library> wire;
  std::vector<Bytes> ids;
  const auto make = [&] {
    wire = std::make_unique<Library>(name, make_fabric(), device, host);
    return host.rank() == 0 ? wire->fabric().make_id() : Bytes();
  };
  if (!all_succeed(host, "device library", timeout, make, &ids, why)) return nullptr;
  const Bytes id = ids[0];
  const auto connect = [&] {
    wire->fabric().connect(host.rank(), host.size(), id, timeout);
    return Bytes();
  };
  if (!all_succeed(host, "device library connected", timeout, connect, &ids, why)) return nullptr;
  return wire;
}

std::unique_ptr<Wire> connect_nccl(Device& device, HostLink& host,
                                   std::chrono::duration<double> timeout, std::string* why) {
  return connect_library("nccl", [&] { return device.make_fabric(); }, device, host, timeout, why);
}

}  // namespace cgx::device
