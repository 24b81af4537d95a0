#include "device/mpi_fabric.h"

#include <atomic>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "device/fabric.h"
#include "device/library.h"
#include "transport/mpi.h"

namespace cgx::device {
namespace {

using Clock = std::chrono::steady_clock;

// A waiting thread has nothing else to do, but peers may need the core. A message of a slot takes
// about this long at 100 Gbit/s.
constexpr auto kSpinTime = std::chrono::milliseconds(1);
constexpr auto kLinger = std::chrono::seconds(1);  // for cancelled messages

class MpiFabric final : public Fabric {
 public:
  MpiFabric(Device& device, std::unique_ptr<MpiMessages> connected)
      : device_(device), messages_(std::move(connected)) {}

  Bytes make_id() override { return {}; }  // the messages are connected already
  void connect(int, int, const Bytes&, Seconds) override {}
  bool waits_on_device() const override { return false; }

  void exchange(std::span<const Message> outgoing, std::span<const Message> incoming, Queue& queue,
                Seconds timeout) override {
    require_open();
    queue.synchronize();
    const auto current = device_.make_current();  // for MPI
    try {
      for (const Message& message : incoming)
        messages_->receive(message.peer, message.at, message.bytes);
      for (const Message& message : outgoing)
        messages_->send(message.peer, message.at, message.bytes);
      poll(timeout);
    } catch (...) {
      abort();  // this rank is out of step with its peers
      messages_->abandon(kLinger);
      throw;
    }
    device_.flush_remote_writes();
  }

  void check() override {}  // exchange() reports failures
  void abort() override { aborted_ = true; }
  void close(Seconds) override {}  // an exchange that has ended here has ended on the peers, too

 private:
  void require_open() const { require(!aborted_, CGX_CLOSED, "MPI messages were aborted"); }

  // Polls until all messages have ended. After progress, polls without sleeping for a moment.
  void poll(Seconds timeout) {
    auto last_moved = Clock::now();
    const auto deadline = last_moved + std::chrono::duration_cast<Clock::duration>(timeout);
    while (true) {
      const bool moved = messages_->progress();
      if (!messages_->pending()) return;
      require_open();
      const auto now = Clock::now();
      if (now >= deadline) give_up(timeout);
      if (moved) last_moved = now;
      if (now - last_moved < kSpinTime)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(kMpiPollInterval);
    }
  }

  [[noreturn]] void give_up(Seconds timeout) const {
    std::string ranks;
    for (const int peer : messages_->pending_peers())
      ranks += join(ranks.empty() ? "rank " : ", rank ", peer);
    fail(CGX_TIMEOUT, "messages did not end within ", timeout.count(), " s; late or lost: ", ranks);
  }

  Device& device_;
  const std::unique_ptr<MpiMessages> messages_;
  std::atomic<bool> aborted_ = false;
};

}  // namespace

std::unique_ptr<Wire> connect_mpi(Device& device, HostLink& host,
                                  std::chrono::duration<double> timeout, std::string* why) {
  std::unique_ptr<MpiMessages> messages;
  Mpi* const mpi = opened_mpi();
  if (mpi && device.reached_by_mpi()) messages = mpi->make_messages();
  const Bytes mine = messages ? messages->address() : Bytes();
  const std::vector<Bytes> addresses = host.exchange("devices by MPI", mine, timeout);
  // Without messages this rank's address is empty, so no rank connects.
  if (!messages || !messages->connect(addresses)) return nullptr;
  return connect_library(
      "mpi", [&] { return std::make_unique<MpiFabric>(device, std::move(messages)); }, device, host,
      timeout, why);
}

}  // namespace cgx::device
