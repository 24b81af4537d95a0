// Ranks that are threads of one process: segments are heap blocks with process-wide serial numbers.
#include <cstring>
#include <mutex>
#include <new>

#include "base/status.h"
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

bool same_process(const LocalOffer& a, const LocalOffer& b) {
  return a.memory == b.memory && a.pid == b.pid;
}

}  // namespace

std::unique_ptr<Connector> make_thread_connector(int rank, int size) {
  return std::make_unique<SharedMemoryConnector>("thread", rank, size,
                                                 std::make_unique<HeapStore>(), same_process,
                                                 "lives in another process");
}

}  // namespace cgx
