// Ranks that are threads of one process: segments are heap blocks with process-wide serial numbers.
#include <unistd.h>

#include <cstring>
#include <mutex>
#include <new>

#include "base/status.h"
#include "transport/host.h"
#include "transport/shared_memory.h"

namespace cgx {
namespace {

using Block = std::shared_ptr<std::byte>;

// Every live heap segment of this process. A rank that fails may free its segments while a peer is
// about to look at them: whoever maps a segment shares its ownership.
struct Heap {
  std::mutex mutex;
  uint64_t next = 1;
  std::unordered_map<uint64_t, std::weak_ptr<std::byte>> blocks;
  static Heap& instance() {
    static Heap* heap = new Heap;  // never destroyed: threads may outlive static destructors
    return *heap;
  }
};

class HeapStore : public SegmentStore {
 public:
  Segment create(size_t bytes) override {
    constexpr std::align_val_t kAlignment{64};
    Block block(static_cast<std::byte*>(::operator new(bytes, kAlignment)),
                [](std::byte* data) { ::operator delete(data, kAlignment); });
    std::memset(block.get(), 0, bytes);
    auto& heap = Heap::instance();
    const std::lock_guard lock(heap.mutex);
    std::erase_if(heap.blocks, [](const auto& entry) { return entry.second.expired(); });
    const uint64_t id = heap.next++;
    heap.blocks[id] = block;
    held_[id] = block;
    return {block.get(), bytes, id};
  }

  std::byte* map(int owner, uint64_t id, size_t) override {
    const auto held = held_.find(id);
    if (held != held_.end()) return held->second.get();
    auto& heap = Heap::instance();
    const std::lock_guard lock(heap.mutex);
    const auto found = heap.blocks.find(id);
    const Block block = found == heap.blocks.end() ? nullptr : found->second.lock();
    require(block != nullptr, CGX_PEER_FAILED, "the memory of rank ", owner, " is gone");
    return (held_[id] = block).get();
  }

  bool alive(int) override { return true; }  // as long as this process is

 private:
  std::unordered_map<uint64_t, Block> held_;
};

class ThreadConnector : public Connector {
 public:
  ThreadConnector(int rank, int size)
      : rank_(rank),
        store_(std::make_unique<HeapStore>()),
        control_(store_->create(ControlSegment::bytes(size))) {}

  Bytes offer() const override { return LocalOffer{this_host(), getpid(), control_.id}.bytes(); }

  std::string refusal(const std::vector<Bytes>& offers) const override {
    for (size_t peer = 0; peer < offers.size(); ++peer) {
      const auto theirs = LocalOffer::read(offers[peer]);
      if (theirs.host != LocalOffer::read(offers[0]).host ||
          theirs.pid != LocalOffer::read(offers[0]).pid)
        return join("rank ", peer, " lives in another process than rank 0");
    }
    return "";
  }

  std::unique_ptr<Transport> connect(const std::vector<Bytes>& offers,
                                     std::chrono::duration<double>) override {
    std::vector<uint64_t> controls;
    for (const auto& offer : offers) controls.push_back(LocalOffer::read(offer).control);
    return std::make_unique<SharedMemoryTransport>("thread", rank_, controls, std::move(store_),
                                                   control_.data);
  }

 private:
  int rank_;
  std::unique_ptr<HeapStore> store_;
  SegmentStore::Segment control_;
};

}  // namespace

std::unique_ptr<Connector> make_thread_connector(int rank, int size) {
  return std::make_unique<ThreadConnector>(rank, size);
}

}  // namespace cgx
