#include "device/mpi_fabric.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "device/fabric.h"
#include "device/library.h"
#include "transport/mpi.h"
#include "transport/mpi_messages.h"

namespace cgx::device {
namespace {

constexpr auto kLinger = std::chrono::seconds(1);  // for what is cancelled

class MpiFabric final : public Fabric {
 public:
  MpiFabric(Device& device, std::unique_ptr<MpiMessages> connected)
      : device_(device),
        messages_(std::move(connected)),
        ended_(device.allocate(sizeof(uint32_t), Place::kPinned)) {}
  ~MpiFabric() override {
    abort();
    if (thread_.joinable()) thread_.join();
  }
  MpiFabric(const MpiFabric&) = delete;
  MpiFabric& operator=(const MpiFabric&) = delete;

  Bytes make_id() override { return {}; }  // the messages are connected
  void connect(int, int, const Bytes&, Seconds) override {
    thread_ = std::thread([this] { serve(); });
  }

  void exchange(std::span<const Message> outgoing, std::span<const Message> incoming, Queue& queue,
                Seconds) override {
    auto put = std::make_unique<Exchange>(
        Exchange{this, {outgoing.begin(), outgoing.end()}, {incoming.begin(), incoming.end()}});
    queue.call(begin, put.get());
    put.release();  // begin() has it now
    queue.wait_for(word(), ++exchanges_);
  }

  void check() override {
    const std::lock_guard lock(mutex_);
    if (failure_) fail(failure_->status, failure_->text);
  }

  void abort() override {
    const std::lock_guard lock(mutex_);
    over_ = true;
    begun_.clear();
    count_up(std::exchange(unended_, 0));
    changed_.notify_all();
  }

  // What this rank has put has ended, and so has this rank's part in what its peers have put.
  void close(Seconds) override { abort(); }

 private:
  struct Exchange {
    MpiFabric* fabric;
    std::vector<Message> outgoing, incoming;
  };
  using Lock = std::unique_lock<std::mutex>;

  uint32_t* word() const { return reinterpret_cast<uint32_t*>(ended_.get()); }
  void count_up(uint32_t exchanges) {
    std::atomic_ref(*word()).fetch_add(exchanges, std::memory_order_release);
  }

  // Called by the queue.
  static void begin(void* context) {
    std::unique_ptr<Exchange> exchange(static_cast<Exchange*>(context));
    MpiFabric& self = *exchange->fabric;
    const std::lock_guard lock(self.mutex_);
    if (self.over_) return self.count_up(1);
    ++self.unended_;
    self.begun_.push_back(std::move(exchange));
    self.changed_.notify_all();
  }

  void serve() {
    Lock lock(mutex_);
    try {
      device_.make_current();
      while (const auto exchange = next(lock)) {
        move(*exchange, lock);
        if (over_) break;
        --unended_;
        count_up(1);
      }
    } catch (const Error& error) {
      if (!lock) lock.lock();
      failure_ = {error.status(), error.what()};  // who watches sees it, and aborts
      changed_.wait(lock, [this] { return over_; });
    }
    lock.unlock();
    messages_->abandon(kLinger);
  }

  // Null when it is over.
  std::unique_ptr<Exchange> next(Lock& lock) {
    changed_.wait(lock, [this] { return over_ || !begun_.empty(); });
    if (over_) return nullptr;
    auto exchange = std::move(begun_.front());
    begun_.pop_front();
    return exchange;
  }

  // Until all its messages have ended, or it is over; without the lock while MPI is called.
  void move(const Exchange& exchange, Lock& lock) {
    lock.unlock();
    for (const Message& message : exchange.incoming)
      messages_->receive(message.peer, message.at, message.bytes);
    for (const Message& message : exchange.outgoing)
      messages_->send(message.peer, message.at, message.bytes);
    lock.lock();
    while (!over_ && messages_->pending()) {
      lock.unlock();
      const bool moved = messages_->progress();
      lock.lock();
      if (!moved) changed_.wait_for(lock, kMpiPollInterval, [this] { return over_; });
    }
    if (over_) return;
    lock.unlock();
    device_.flush_remote_writes();
    lock.lock();
  }

  Device& device_;
  const std::unique_ptr<MpiMessages> messages_;  // the thread's
  const Memory ended_;                           // exchanges, counted by the host
  uint32_t exchanges_ = 0;                       // put on the queue so far
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Exchange>> begun_;  // for the thread
  uint32_t unended_ = 0;                         // these, and the one that it moves
  std::optional<Failure> failure_;
  bool over_ = false;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Wire> connect_mpi(Device& device, HostLink& host,
                                  std::chrono::duration<double> timeout, std::string* why) {
  auto messages = std::make_unique<MpiMessages>();
  const Bytes mine = device.reached_by_mpi() ? messages->address() : Bytes();
  const std::vector<Bytes> addresses = host.exchange("devices by MPI", mine, timeout);
  if (!MpiMessages::can_connect(addresses)) return nullptr;
  messages->connect(addresses);
  return connect_library(
      "mpi", [&] { return std::make_unique<MpiFabric>(device, std::move(messages)); }, device, host,
      timeout, why);
}

}  // namespace cgx::device
