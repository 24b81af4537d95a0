#include "device/direct.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/bytes.h"
#include "base/hash.h"
#include "base/status.h"
#include "device/agree.h"
#include "device/windows.h"

namespace cgx::device {
namespace {

constexpr int64_t kMostSlotBytes = 8 << 20;
constexpr int64_t kWindowBytes = 64 << 20;  // limit for all slots together

int64_t aligned(int64_t bytes) {
  return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

// The contents of a notice.
struct NoticeData {
  Agreement agreement;
  uint64_t number;
  double timeout_s;  // differs between ranks, so it is not in the digest
  // The rest of the words; longer names are truncated.
  char name[sizeof(Notice::words) - sizeof(agreement) - sizeof(number) - sizeof(timeout_s)];
};
static_assert(sizeof(NoticeData) == sizeof(Notice::words) && sizeof(NoticeData::name) >= 32);

Notice notice_of(const Call& call) {
  Notice notice{};
  NoticeData data{};
  data.agreement = call.agreement;
  data.number = call.number;
  put_text(data.name, call.name);
  std::memcpy(notice.words, &data, sizeof(data));
  notice.digest =
      fnv1a(std::as_bytes(std::span(notice.words)), fnv1a(std::as_bytes(std::span(call.name))));
  data.timeout_s = call.timeout.count();
  std::memcpy(notice.words, &data, sizeof(data));
  return notice;
}

NoticeData data_of(const Notice& notice) {
  NoticeData data;
  std::memcpy(&data, notice.words, sizeof(data));
  return data;
}

// Formats a device's report.
std::string text_of(const Report& report) {
  const NoticeData ours = data_of(report.ours);
  const std::string what = join("device collective ", title_of(ours.name, ours.number));
  switch (report.status) {
    case CGX_TIMEOUT:
      return join(what, ": rank ", report.rank, " has not called it within ", ours.timeout_s,
                  " s; it is late or lost, or has called fewer collectives");
    case CGX_MISMATCH: {
      const NoticeData theirs = data_of(report.theirs);
      const std::string differs =
          theirs.number != ours.number || std::strcmp(theirs.name, ours.name)
              ? join("it calls ", title_of(theirs.name, theirs.number))
              : difference(ours.agreement, theirs.agreement);
      return join(
          what, ": rank ", report.rank, " disagrees: ", differs,
          "; every rank must call GPU collectives with the same arguments in the same order");
    }
    default:
      return join(what, ": rank ", report.rank, " gave up before it ended");
  }
}

// The message of a rank to all when it connects: how to map its window, and its announcement.
struct Offer {
  Bytes shared, announcement;

  Bytes bytes() const {
    Bytes all = to_bytes(static_cast<uint64_t>(shared.size()));
    all.insert(all.end(), shared.begin(), shared.end());
    all.insert(all.end(), announcement.begin(), announcement.end());
    return all;
  }
  static Offer read(std::span<const std::byte> bytes) {
    const size_t head = std::min(bytes.size(), sizeof(uint64_t));
    const auto size = from_bytes<uint64_t>(bytes.first(head), "a rank's offer of its window");
    const auto rest = bytes.subspan(head);
    require(size <= rest.size(), CGX_PEER_FAILED, "a rank's offer of its window has ", rest.size(),
            " bytes instead of ", size);
    return {to_bytes(rest.first(size)), to_bytes(rest.subspan(size))};
  }
};

class Direct final : public Wire, private Lane {
 public:
  Direct(Device& device, HostLink& host)
      : host_(host),
        slot_bytes_(slot_bytes_for(kMostSlotBytes, kWindowBytes, 2 * host.size())),
        first_slot_(aligned(2 * host.size() * static_cast<int64_t>(sizeof(Mailbox)))),
        window_(device.allocate(first_slot_ + 2 * region_bytes(), Place::kDevice)),
        control_(device.allocate(sizeof(Control), Place::kDevice)),
        pinned_(device.allocate(sizeof(Pinned), Place::kPinned)),
        shared_(device.share(window_)),
        number_(Windows::of_process().add(window_)) {
    pinned()->given_up = kFailedAndNotified + 1;
  }
  ~Direct() override { unmap(); }

  Offer offer() const { return {shared_, Windows::of_process().announcement(number_)}; }
  // `offers`: by rank.
  void open(Device& device, const std::vector<Offer>& offers) {
    for (int peer = 0; peer < host_.size(); ++peer)
      windows_.push_back(peer == host_.rank() ? window_ : device.open(offers[peer].shared));
  }
  uint64_t number() const { return number_; }

  // ---- Wire ----

  const char* name() const override { return "direct"; }
  int64_t slot_bytes() const override { return slot_bytes_; }
  bool recordable() const override { return true; }
  Regions regions() const override { return {&control()->done, region_bytes()}; }

  void begin(const Call& call, Queue& caller) override {
    queue_ = &caller;
    timeout_ = call.timeout;
    notice_ = notice_of(call);
  }
  Lane& lane(int64_t) override { return *this; }
  void end(Queue&) override { queue_ = nullptr; }

  std::optional<Failure> failure() override {
    Report& report = pinned()->report;
    const uint32_t status = std::atomic_ref(report.status).load(std::memory_order_acquire);
    if (status == CGX_OK) return std::nullopt;
    return Failure{static_cast<cgx_status_t>(status), text_of(report)};
  }

  // Lets the caller's queue continue, and notifies peers, which wait for messages that will not
  // come.
  void give_up(Queue& caller) override {
    caller.copy(&control()->fault, &pinned()->given_up, sizeof(uint32_t));
    queue_ = &caller;
    exchange(Traffic::kAll, {}, {});
  }
  void close(std::chrono::duration<double>) override { unmap(); }

 private:
  void unmap() {
    windows_.clear();
    window_.reset();
    try {
      Windows::of_process().close(number_);
    } catch (const std::bad_alloc&) {
      // The memory stays allocated.
    }
  }

  // In device memory.
  struct Control {
    uint64_t done;  // number of exchanges
    uint32_t fault;
  };
  Control* control() const { return reinterpret_cast<Control*>(control_.get()); }
  struct Pinned {
    Report report;
    uint32_t given_up;
  };
  Pinned* pinned() const { return reinterpret_cast<Pinned*>(pinned_.get()); }
  int64_t region_bytes() const { return slot_bytes_ * host_.size(); }
  std::byte* slot(int window, int sender) const {
    return windows_[window].get() + first_slot_ + sender * slot_bytes_;
  }

  // ---- Lane ----

  Queue& queue() override { return *queue_; }
  const uint32_t* fault() const override { return &control()->fault; }

  Slots slots(Traffic) override {
    Slots slots{{}, slot(host_.rank(), 0), slot_bytes_};
    for (int peer = 0; peer < host_.size(); ++peer) slots.to.push_back(slot(peer, host_.rank()));
    return slots;
  }

  void exchange(Traffic, std::span<const int64_t>, std::span<const int64_t>) override {
    Signals launch{};
    launch.rank = host_.rank();
    launch.size = host_.size();
    for (int peer = 0; peer < host_.size(); ++peer)
      launch.at_peer[peer] = reinterpret_cast<Mailbox*>(windows_[peer].get());
    launch.done = &control()->done;
    launch.timeout_ns = static_cast<uint64_t>(timeout_.count() * 1e9);
    launch.notice = notice_;
    launch.fault = &control()->fault;
    launch.report = &pinned()->report;
    queue_->signal(launch);
  }

  HostLink& host_;
  const int64_t slot_bytes_, first_slot_;
  Memory window_;
  const Memory control_, pinned_;
  const Bytes shared_;
  const uint64_t number_;  // in Windows
  std::vector<Memory> windows_;
  // The collective that is being enqueued:
  Queue* queue_ = nullptr;
  std::chrono::duration<double> timeout_{0};
  Notice notice_{};
};

}  // namespace

std::unique_ptr<Wire> connect_direct(Device& device, HostLink& host,
                                     std::chrono::duration<double> timeout, std::string* why) {
  if (host.size() > kMostPeers) {
    *why =
        join("there are ", host.size(), " ranks, but it supports at most ", kMostPeers, " ranks");
    return nullptr;
  }
  Windows& of_process = Windows::of_process();
  std::unique_ptr<Direct> wire;
  std::vector<Bytes> blobs, announcements, nothing;
  const auto allocate = [&] {
    wire = std::make_unique<Direct>(device, host);
    return wire->offer().bytes();
  };
  if (!all_succeed(host, "device windows", timeout, allocate, &blobs, why)) {
    if (wire) of_process.withdraw(wire->number());  // no rank opens windows
    return nullptr;
  }
  std::vector<Memory> unmapped;
  const auto open = [&] {
    std::vector<Offer> offers;
    for (const Bytes& blob : blobs) {
      offers.push_back(Offer::read(blob));
      announcements.push_back(offers.back().announcement);
    }
    unmapped = of_process.connect(wire->number(), announcements);
    wire->open(device, offers);
    return Bytes();
  };
  const bool opened = all_succeed(host, "device windows opened", timeout, open, &nothing, why);
  of_process.know(wire->number(), announcements);
  if (!opened) return nullptr;
  return wire;
}

}  // namespace cgx::device
