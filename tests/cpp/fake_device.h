// A simulated device: it uses host memory, each queue is a thread that runs its work in order, and
// CPU codecs replace the kernels. So all of device/ runs without a GPU, and under ThreadSanitizer.
//
//   1. kernels, as declared in launches.h
//   2. FakeEvent and FakeQueue
//   3. FakeFabric: a communication library between simulated devices
//   4. FakeDevice
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/float_mode.h"
#include "base/seeds.h"
#include "base/status.h"
#include "codings.h"
#include "device/fabric.h"
#include "device/queue.h"
#include "kernel/kernels.h"

namespace cgx::device {

// ---- 1. kernels ----------------------------------------------------------------------------

inline Rounding rounding_of(RoundingMode mode, uint32_t rank, uint32_t phase, const Piece& piece) {
  const uint64_t seed =
      piece.seed_at ? segment_seed(*piece.seed_at, piece.seed_number) : piece.seed;
  return {mode, block_seed(seed, piece.block), rank, phase};
}

inline int64_t region_offset(const Regions& regions, uint64_t ahead) {
  return regions.done ? static_cast<int64_t>((*regions.done + ahead) % 2) * regions.bytes : 0;
}

inline bool has_failed(const uint32_t* fault) { return fault && *fault != 0; }

inline void fill_nan(Dtype dtype, void* values, int64_t numel) {
  if (!values) return;
  const std::vector<float> nans(numel, std::numeric_limits<float>::quiet_NaN());
  kernels().convert(Dtype::kFloat32, nans.data(), dtype, values, numel);
}

// A rank's values plus their residual, in fp32.
inline std::vector<float> own_values(Dtype dtype, const Piece& piece) {
  std::vector<float> values(piece.numel);
  kernels().convert(dtype, piece.values, Dtype::kFloat32, values.data(), piece.numel);
  if (piece.residual)
    kernels().add(dtype, piece.residual, values.data(), values.data(), piece.numel);
  return values;
}

// Stores the quantization error of the fp32 values, times `residual_scale`.
inline void keep_residual(const Piece& piece, Dtype dtype, const Codec& codec,
                          const std::byte* bytes, const std::vector<float>& values, float scale) {
  if (!piece.residual) return;
  const auto numel = static_cast<int64_t>(values.size());
  std::vector<float> decoded(values.size());
  codec.decode({bytes, static_cast<size_t>(codec.max_bytes(numel))}, numel, piece.first_index,
               Dtype::kFloat32, decoded.data());
  kernels().subtract(values.data(), decoded.data(), decoded.data(), numel);
  kernels().scale(decoded.data(), scale, dtype, piece.residual, numel);
}

inline void write_copies(const Copies& copies, const std::byte* message, int64_t bytes,
                         std::byte* first) {
  std::memcpy(first, message, bytes);
  for (int i = 0; i < copies.count; ++i) std::memcpy(first + copies.distance[i], message, bytes);
}

inline void run(const Encode& launch) {
  const bool failed = has_failed(launch.fault);
  for (int i = 0; i < launch.pieces.count; ++i) {
    const Piece& piece = launch.pieces.at[i];
    if (failed) {
      fill_nan(launch.dtype, piece.residual, piece.numel);
      continue;
    }
    const auto codec = test::codec_of(launch.dtype, piece, piece.coding);
    std::vector<std::byte> message(codec->max_bytes(piece.numel));
    const Rounding rounding = rounding_of(launch.rounding, launch.rank, launch.phase, piece);
    if (piece.residual) {
      const std::vector<float> values = own_values(launch.dtype, piece);
      codec->encode(Dtype::kFloat32, values.data(), piece.numel, piece.first_index, rounding,
                    message.data());
      keep_residual(piece, launch.dtype, *codec, message.data(), values, 1.0f);
    } else {
      codec->encode(launch.dtype, piece.values, piece.numel, piece.first_index, rounding,
                    message.data());
    }
    write_copies(launch.copies, message.data(), message.size(),
                 piece.message + region_offset(launch.regions, 1));
  }
}

inline void run(const Reduce& launch) {
  const bool failed = has_failed(launch.fault);
  for (int i = 0; i < launch.pieces.count; ++i) {
    const Piece& piece = launch.pieces.at[i];
    if (failed) {
      fill_nan(launch.dtype, piece.residual, piece.numel);
      fill_nan(launch.dtype, piece.result, piece.numel);
      continue;
    }
    const auto from = test::codec_of(launch.dtype, piece, piece.coding);
    std::vector<float> sum(piece.numel), other(piece.numel);
    for (int rank = 0; rank < launch.size; ++rank) {
      std::vector<float>& into = rank == 0 ? sum : other;
      if (rank == launch.own) {
        into = own_values(launch.dtype, piece);
        test::vote(piece.coding, piece.bucket_size, into.data(), piece.numel);
      } else {
        from->decode({piece.message + region_offset(launch.regions, 0) + rank * launch.stride,
                      static_cast<size_t>(from->max_bytes(piece.numel))},
                     piece.numel, piece.first_index, Dtype::kFloat32, into.data());
      }
      if (rank > 0) kernels().combine(launch.op, other.data(), sum.data(), piece.numel);
    }
    if (launch.op == Op::kAvg) kernels().divide(sum.data(), launch.divisor, piece.numel);
    if (piece.reduced || test::is_vote(piece.reduced_coding)) {
      const auto to = test::codec_of(launch.dtype, piece, piece.reduced_coding);
      std::vector<std::byte> message(to->max_bytes(piece.numel));
      to->encode(Dtype::kFloat32, sum.data(), piece.numel, piece.first_index,
                 rounding_of(launch.rounding, launch.rank, launch.phase, piece), message.data());
      keep_residual(piece, launch.dtype, *to, message.data(), sum, launch.residual_scale);
      if (piece.reduced)
        write_copies(launch.copies, message.data(), message.size(),
                     piece.reduced + region_offset(launch.regions, 1));
      if (piece.result)
        to->decode(message, piece.numel, piece.first_index, launch.dtype, piece.result);
    } else {
      kernels().convert(Dtype::kFloat32, sum.data(), launch.dtype, piece.result, piece.numel);
    }
  }
}

inline void run(const Decode& launch) {
  for (int i = 0; i < launch.pieces.count; ++i) {
    const Piece& piece = launch.pieces.at[i];
    if (has_failed(launch.fault)) {
      fill_nan(launch.dtype, piece.result, piece.numel);
      continue;
    }
    const auto codec = test::codec_of(launch.dtype, piece, piece.coding);
    codec->decode({piece.message + region_offset(launch.regions, 0),
                   static_cast<size_t>(codec->max_bytes(piece.numel))},
                  piece.numel, piece.first_index, launch.dtype, piece.result);
  }
}

inline void run(const Signals& launch) {
  const uint64_t exchange = *launch.done + 1;
  const auto mailbox = [&](uint64_t which, int at, int sender) -> Mailbox& {
    return launch.at_peer[at][which % 2 * launch.size + sender];
  };
  const auto number = [](Mailbox& box) { return std::atomic_ref(box.exchange); };
  const auto notify_peers = [&](uint64_t which, uint64_t value) {  // for exchange `which`
    for (int peer = 0; peer < launch.size; ++peer)
      if (peer != launch.rank)
        number(mailbox(which, peer, launch.rank)).store(value, std::memory_order_release);
  };
  const auto give_up = [&](cgx_status_t status, int peer, const Notice* theirs) {
    *launch.fault = kFailedAndNotified;
    if (launch.report->status == CGX_OK) {
      launch.report->rank = peer;
      launch.report->exchange = exchange;
      launch.report->ours = launch.notice;
      if (theirs) launch.report->theirs = *theirs;
      std::atomic_ref(launch.report->status).store(status, std::memory_order_release);
    }
    notify_peers(exchange + 1, kGaveUp | exchange);
    if (status != CGX_MISMATCH) notify_peers(exchange, kGaveUp | exchange);
  };
  if (*launch.fault == kFailedAndNotified) return;
  if (*launch.fault) {
    *launch.fault = kFailedAndNotified;
    notify_peers(exchange + 1, kGaveUp | exchange);
    return notify_peers(exchange, kGaveUp | exchange);
  }
  for (int peer = 0; peer < launch.size; ++peer)
    if (peer != launch.rank) mailbox(exchange, peer, launch.rank).notice = launch.notice;
  notify_peers(exchange, exchange);
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::nanoseconds(launch.timeout_ns);
  for (int peer = 0; peer < launch.size; ++peer) {
    if (peer == launch.rank) continue;
    Mailbox& box = mailbox(exchange, launch.rank, peer);
    uint64_t seen;
    while ((seen = number(box).load(std::memory_order_acquire)) < exchange) {
      if (std::chrono::steady_clock::now() >= deadline) return give_up(CGX_TIMEOUT, peer, nullptr);
      std::this_thread::yield();
    }
    if ((seen & kGaveUp) && (seen & ~kGaveUp) <= exchange)
      return give_up(CGX_PEER_FAILED, peer, nullptr);
    if (box.notice.digest != launch.notice.digest) return give_up(CGX_MISMATCH, peer, &box.notice);
  }
  *launch.done = exchange;
}

// ---- 2. events and queues -------------------------------------------------------------------

class FakeEvent final : public Event {
 public:
  void synchronize() override {
    if (const auto reached = last()) reached->wait(false);
  }
  // Returns whether the point of the last record is reached, or null if there is none.
  std::shared_ptr<std::atomic<bool>> last() const {
    const std::lock_guard lock(mutex_);
    return last_;
  }
  void set(std::shared_ptr<std::atomic<bool>> reached) {
    const std::lock_guard lock(mutex_);
    last_ = std::move(reached);
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<std::atomic<bool>> last_;
};

class FakeQueue final : public Queue {
 public:
  explicit FakeQueue(uint32_t seed) : random_(seed), thread_([this] { serve(); }) {}
  ~FakeQueue() override {
    synchronize();
    put([this] { stop_ = true; });
    thread_.join();
  }
  void encode(const Encode& launch) override {
    put([launch] { run(launch); });
  }
  void reduce(const Reduce& launch) override {
    put([launch] { run(launch); });
  }
  void decode(const Decode& launch) override {
    put([launch] { run(launch); });
  }
  void signal(const Signals& launch) override {
    put([launch] { run(launch); });
  }
  void copy(void* to, const void* from, size_t bytes) override {
    if (bytes == sizeof(uint32_t)) {  // atomically, like a device
      put([=] {
        const std::atomic_ref word(*static_cast<uint32_t*>(const_cast<void*>(from)));
        *static_cast<uint32_t*>(to) = word.load(std::memory_order_acquire);
      });
    } else {
      put([=] { std::memcpy(to, from, bytes); });
    }
  }
  void clear(void* at, size_t bytes) override {
    put([=] { std::memset(at, 0, bytes); });
  }
  void call(void (*work)(void*), void* context) override {
    put([=] { work(context); });
  }
  void wait_for(const uint32_t* word, uint32_t value) override {
    put([=] {
      const std::atomic_ref seen(*const_cast<uint32_t*>(word));
      while (static_cast<int32_t>(seen.load(std::memory_order_acquire) - value) < 0)
        std::this_thread::yield();
    });
  }
  void record(Event& event) override {
    auto reached = std::make_shared<std::atomic<bool>>(false);
    static_cast<FakeEvent&>(event).set(reached);
    put([reached] {
      *reached = true;
      reached->notify_all();
    });
  }
  void wait_for(const Event& event) override {
    put([reached = static_cast<const FakeEvent&>(event).last()] {
      if (reached) reached->wait(false);
    });
  }
  bool idle() override {
    const std::lock_guard lock(mutex_);
    return done_ == put_;
  }
  void synchronize() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&, until = put_] { return done_ >= until; });
  }
  void put(std::function<void()> work) {
    ++operations;
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    ++put_;
    changed_.notify_all();
  }

  static inline thread_local int operations = 0;  // that this thread put on all queues

 private:
  void serve() {
    const FloatMode mode;
    std::unique_lock lock(mutex_);
    while (!stop_) {
      changed_.wait(lock, [&] { return !work_.empty(); });
      const auto work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      // Random delays reveal work that should wait for this queue but does not.
      if (random_() % 32 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
      work();
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  std::mt19937 random_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  uint64_t put_ = 0, done_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

// A stream of the caller, as passed to the core: wrap() returns a queue that forwards all calls.
class FakeStream final : public Queue {
 public:
  explicit FakeStream(FakeQueue* to) : to_(*to) {}
  void encode(const Encode& launch) override { to_.encode(launch); }
  void reduce(const Reduce& launch) override { to_.reduce(launch); }
  void decode(const Decode& launch) override { to_.decode(launch); }
  void signal(const Signals& launch) override { to_.signal(launch); }
  void copy(void* to, const void* from, size_t bytes) override { to_.copy(to, from, bytes); }
  void clear(void* at, size_t bytes) override { to_.clear(at, bytes); }
  void call(void (*work)(void*), void* context) override { to_.call(work, context); }
  void wait_for(const uint32_t* word, uint32_t value) override { to_.wait_for(word, value); }
  void record(Event& event) override { to_.record(event); }
  void wait_for(const Event& event) override { to_.wait_for(event); }
  bool idle() override { return to_.idle(); }
  void synchronize() override { to_.synchronize(); }

  FakeQueue& queue() { return to_; }

 private:
  FakeQueue& to_;
};

inline FakeQueue& fake_queue(Queue& queue) {
  auto* stream = dynamic_cast<FakeStream*>(&queue);
  return stream ? stream->queue() : static_cast<FakeQueue&>(queue);
}

// ---- 3. a communication library --------------------------------------------------------------

// The state that the ranks of one library communicator share.
struct FakeNetwork {
  std::mutex mutex;
  std::condition_variable changed;
  int connected = 0;
  std::map<std::pair<int, int>, std::deque<std::vector<std::byte>>> sent;  // from, to
};

// Set by tests to inject faults; the counters are read by them.
struct FakeFabricFaults {
  std::atomic<bool> missing = false;    // the library is not installed
  std::atomic<bool> delivers = true;    // false: messages are lost
  std::atomic<bool> accepts = true;     // false: exchange() fails
  std::atomic<bool> lost_peer = false;  // check() reports a lost peer
  std::atomic<int> exchanges = 0, aborts = 0;
};

class FakeFabric final : public Fabric {
 public:
  explicit FakeFabric(FakeFabricFaults& faults) : faults_(faults) {
    require(!faults.missing, CGX_SYSTEM, "no fake library here");
  }
  ~FakeFabric() override {
    if (!closed_) abort();
  }

  // The id is the address of the network, which `made_` keeps alive.
  Bytes make_id() override {
    auto* network = new std::shared_ptr<FakeNetwork>(std::make_shared<FakeNetwork>());
    made_.reset(network);
    Bytes id(sizeof(network));
    std::memcpy(id.data(), &network, sizeof(network));
    return id;
  }
  void connect(int rank, int size, const Bytes& id, Seconds timeout) override {
    std::shared_ptr<FakeNetwork>* shared;
    require(id.size() == sizeof(shared), CGX_INTERNAL, "an id of ", id.size(), " bytes");
    std::memcpy(&shared, id.data(), sizeof(shared));
    network_ = *shared;
    rank_ = rank;
    std::unique_lock lock(network_->mutex);
    ++network_->connected;
    network_->changed.notify_all();
    require(network_->changed.wait_for(lock, timeout, [&] { return network_->connected == size; }),
            CGX_TIMEOUT, "a rank has not connected");
  }
  void exchange(std::span<const Message> outgoing, std::span<const Message> incoming, Queue& queue,
                Seconds) override {
    ++faults_.exchanges;
    require(faults_.accepts, CGX_SYSTEM, "the fake library takes no more");
    fake_queue(queue).put([this, out = std::vector(outgoing.begin(), outgoing.end()),
                           in = std::vector(incoming.begin(), incoming.end())] {
      send(out);
      for (const Message& message : in) receive(message);
    });
  }
  void check() override {
    require(!faults_.lost_peer, CGX_PEER_FAILED, "the fake library lost a peer");
  }
  void abort() override {
    ++faults_.aborts;
    if (!network_) return;
    const std::lock_guard lock(network_->mutex);
    aborted_ = true;
    network_->changed.notify_all();
  }
  void close(Seconds) override { closed_ = true; }

 private:
  void send(const std::vector<Message>& messages) {
    const std::lock_guard lock(network_->mutex);
    if (aborted_ || !faults_.delivers) return;
    for (const Message& message : messages)
      network_->sent[{rank_, message.peer}].emplace_back(message.at.get(),
                                                         message.at.get() + message.bytes);
    network_->changed.notify_all();
  }
  void receive(const Message& message) {
    std::unique_lock lock(network_->mutex);
    auto& arrived = network_->sent[{message.peer, rank_}];
    network_->changed.wait(lock, [&] { return aborted_ || !arrived.empty(); });
    if (aborted_) {
      std::memset(message.at.get(), 0x37, message.bytes);
      return;
    }
    if (arrived.front().size() != message.bytes) std::abort();  // NCCL would hang or corrupt memory
    std::memcpy(message.at.get(), arrived.front().data(), message.bytes);
    arrived.pop_front();
  }

  FakeFabricFaults& faults_;
  std::unique_ptr<std::shared_ptr<FakeNetwork>> made_;
  std::shared_ptr<FakeNetwork> network_;
  int rank_ = 0;
  bool aborted_ = false;  // guarded by network_->mutex
  bool closed_ = false;
};

// ---- 4. devices ----------------------------------------------------------------------------

class FakeDevice final : public Device {
 public:
  explicit FakeDevice(int number) : name_("fake:" + std::to_string(number)) {}

  const std::string& name() const override { return name_; }
  std::unique_ptr<Queue> make_queue() override { return std::make_unique<FakeQueue>(++queues_); }
  std::unique_ptr<Event> make_event() override { return std::make_unique<FakeEvent>(); }
  std::unique_ptr<Queue> wrap(void* stream) override {
    return std::make_unique<FakeStream>(static_cast<FakeQueue*>(stream));
  }
  bool recording(void*) override { return is_recording; }
  void synchronize() override {}  // needed only after graph captures
  Memory allocate(size_t bytes, Place) override {
    require(bytes <= memory_left, CGX_SYSTEM, bytes, " bytes wanted on ", name(), ", ", memory_left,
            " are left");
    bytes_in_use += static_cast<int64_t>(bytes);
    return {new (std::align_val_t(256)) std::byte[bytes](), [bytes](std::byte* at) {
              if (std::lock_guard lock(mappings_mutex()); mappings().contains(at)) std::abort();
              bytes_in_use -= static_cast<int64_t>(bytes);
              ::operator delete[](at, std::align_val_t(256));
            }};
  }
  Bytes share(const Memory& memory) override { return to_bytes(memory.get()); }
  // Peers may not free the memory before it is closed, as on a GPU.
  Memory open(const Bytes& shared) override {
    require(reaches_peers, CGX_SYSTEM, name(), " does not reach its peers' memory");
    auto* const address = from_bytes<std::byte*>(shared, "memory of a peer");
    const std::lock_guard lock(mappings_mutex());
    mappings().insert(address);
    return {address, [](std::byte* at) {
              const std::lock_guard lock(mappings_mutex());
              mappings().erase(mappings().find(at));
            }};
  }
  std::unique_ptr<Fabric> make_fabric() override { return std::make_unique<FakeFabric>(fabric); }
  bool reached_by_mpi() override { return is_reached_by_mpi; }
  std::shared_ptr<void> make_current() override {
    ++times_current;
    return {std::exchange(current_, this), [](FakeDevice* before) { current_ = before; }};
  }
  void flush_remote_writes() override {
    if (current_ != this) std::abort();
    ++flushes;
  }
  void check_address(const void* address, const BufferName& what) override {
    ++addresses_checked;
    require(address != freed, CGX_INVALID_ARGUMENT, what, " has been freed");
  }

  std::atomic<bool> is_recording = false, reaches_peers = true, is_reached_by_mpi = false;
  std::atomic<int> times_current = 0, flushes = 0, addresses_checked = 0;
  const void* freed = nullptr;
  std::atomic<size_t> memory_left = std::numeric_limits<size_t>::max();
  FakeFabricFaults fabric;
  static inline std::atomic<int64_t> bytes_in_use = 0;  // of all devices

 private:
  static std::mutex& mappings_mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::multiset<std::byte*>& mappings() {
    static std::multiset<std::byte*> mappings;
    return mappings;
  }
  static inline thread_local FakeDevice* current_ = nullptr;

  const std::string name_;
  uint32_t queues_ = 0;
};

}  // namespace cgx::device
