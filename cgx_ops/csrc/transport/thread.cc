// Ranks that are threads of one process. Segments are anonymous memory with process-wide ids. The
// kernel provides zeroed pages on first use; most of a large control segment is never used.
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <mutex>

#include "base/status.h"
#include "transport/shared_memory.h"

namespace cgx {
namespace {

struct Block {
  std::shared_ptr<std::byte> memory;
  size_t bytes = 0;
};

// All live segments of this process. A failing rank may free its segments while a peer is about to
// read them, so mapping a segment shares its ownership.
struct Segments {
  struct Entry {
    std::weak_ptr<std::byte> memory;
    size_t bytes;
  };
  std::mutex mutex;
  uint64_t next = 1;
  std::unordered_map<uint64_t, Entry> live;
  static Segments& instance() {
    static auto* segments =
        new Segments;  // never destroyed: threads may outlive static destructors
    return *segments;
  }
};

class ThreadStore : public SegmentStore {
 public:
  Segment create(size_t bytes) override {
    void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require(data != MAP_FAILED, CGX_SYSTEM, "cannot allocate ", bytes,
            " bytes of memory: ", std::strerror(errno));
    madvise(data, bytes, MADV_NOHUGEPAGE);  // a huge page would be zeroed as a whole
    const Block block{{static_cast<std::byte*>(data), [bytes](auto* at) { munmap(at, bytes); }},
                      bytes};
    auto& segments = Segments::instance();
    const std::lock_guard lock(segments.mutex);
    std::erase_if(segments.live, [](const auto& entry) { return entry.second.memory.expired(); });
    const uint64_t id = segments.next++;
    segments.live[id] = {block.memory, bytes};
    held_[id] = block;
    return {block.memory, bytes, id};
  }

  std::byte* map(int owner, uint64_t id, size_t bytes, Access) override {
    Block& block = held_[id];
    if (!block.memory) block = find(id);
    require(block.memory && bytes <= block.bytes, CGX_PEER_FAILED, "the memory of rank ", owner,
            " is gone");
    return block.memory.get();
  }

  bool alive(int) override { return true; }  // as long as this process

 private:
  static Block find(uint64_t id) {
    auto& segments = Segments::instance();
    const std::lock_guard lock(segments.mutex);
    const auto found = segments.live.find(id);
    if (found == segments.live.end()) return {};
    return {found->second.memory.lock(), found->second.bytes};
  }

  std::unordered_map<uint64_t, Block> held_;
};

bool same_process(const LocalOffer& a, const LocalOffer& b) {
  return a.memory == b.memory && a.pid == b.pid;
}

}  // namespace

std::unique_ptr<Connector> make_thread_connector(int rank, int size) {
  return std::make_unique<SharedMemoryConnector>(
      "thread", rank, size, std::make_unique<ThreadStore>(), same_process, "is in another process");
}

}  // namespace cgx
