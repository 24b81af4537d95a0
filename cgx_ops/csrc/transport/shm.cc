// Ranks that are processes of one host. A rank's segments are ranges of one memory file (memfd),
// which peers open through /proc/<pid>/fd. The file has no name in /dev/shm, so jobs cannot
// collide, and nothing remains when a process ends in any way.
//
// When a peer opens a descriptor, its number may belong to another file: the owner may have closed
// the communicator, or may have ended. So the peer compares device and inode with the owner's
// offer. It maps only files that are sealed against shrinking, which are always memory files, so
// that reading the mapping cannot fault.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/status.h"
#include "transport/file_descriptor.h"
#include "transport/process.h"
#include "transport/shared_memory.h"

namespace cgx {
namespace {

// Whether an error is a resource shortage, which may be temporary.
bool is_short(int error) { return error == EMFILE || error == ENFILE || error == ENOMEM; }

[[noreturn]] void fail_short(const std::string& what, int error) {
  const char* const remedy = error == ENOMEM ? "raise the memory limit (ulimit -v)"
                             : is_short(error)
                                 ? "close files, or raise the limit of open files (ulimit -n)"
                                 : "see the errors of memfd_create(2), ftruncate(2), mmap(2)";
  fail(CGX_SYSTEM, what, ": ", std::strerror(error), "; ", remedy);
}

class Mapping {
 public:
  Mapping(int fd, off_t offset, size_t bytes, int protection) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, protection, MAP_SHARED, fd, offset);
    if (data_ == MAP_FAILED) fail_short(join("cannot map ", bytes, " bytes"), errno);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { munmap(data_, bytes_); }
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  void* data_;
  size_t bytes_;
};

const size_t kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));

// Ids are never 0.
uint64_t id_of(size_t offset) { return offset / kPage + 1; }
size_t offset_of(uint64_t id) { return (id - 1) * kPage; }

bool same_file(const MemoryFile& file, const struct stat& found) {
  return found.st_dev == file.device && found.st_ino == file.inode;
}

class MemoryFileStore : public SegmentStore {
 public:
  MemoryFileStore() : fd_(memfd_create("cgx", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    struct stat made;
    if (fd_.get() < 0 || fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK) < 0 ||
        fstat(fd_.get(), &made) < 0)
      fail_short("cannot create shared memory", errno);
    file_ = {fd_.get(), made.st_dev, made.st_ino};
  }

  Segment create(size_t bytes) override {
    const size_t begin = bytes_, end = begin + (bytes + kPage - 1) / kPage * kPage;
    if (ftruncate(fd_.get(), static_cast<off_t>(end)) < 0)
      fail_short(join("cannot create ", bytes, " bytes of shared memory"), errno);
    bytes_ = end;
    const auto mapping = std::make_shared<Mapping>(fd_.get(), begin, bytes, PROT_READ | PROT_WRITE);
    return {{mapping, mapping->data()}, bytes, id_of(begin)};
  }

  std::byte* map(int owner, uint64_t id, size_t bytes, Access access) override {
    Peer& peer = peers_.at(owner);
    auto& mapping = peer.mapped[id];
    if (!mapping) mapping = open_mapping(owner, peer, id, bytes, access);
    require(bytes <= mapping->bytes(), CGX_PEER_FAILED, "rank ", owner,
            " sent the size of segment ", id, " has ", bytes, " bytes, but it has ",
            mapping->bytes());
    return mapping->data();
  }

  MemoryFile file() const override { return file_; }

  bool alive(int peer) override { return peers_.at(peer).process->alive(); }

  void set_peers(const std::vector<std::optional<LocalOffer>>& peers) override {
    for (const auto& offer : peers) {
      Peer& met = peers_.emplace_back();
      if (!offer) continue;
      met.pid = static_cast<pid_t>(offer->pid);
      met.file = offer->file;
      met.process = Process::of(met.pid);
    }
  }

 private:
  struct Peer {  // set for ranks that share memory only
    pid_t pid = 0;
    MemoryFile file;
    std::shared_ptr<Process> process;
    std::unordered_map<uint64_t, std::unique_ptr<Mapping>> mapped;
  };

  static std::unique_ptr<Mapping> open_mapping(int owner, const Peer& peer, uint64_t id,
                                               size_t bytes, Access access) {
    const auto gone = [&](const std::string& why) {
      fail(CGX_PEER_FAILED, "the shared memory of rank ", owner, " (process ", peer.pid,
           ") is gone: ", why);
    };
    const auto check = [&](int result) {
      if (result >= 0) return;
      if (is_short(errno)) fail_short(join("cannot open the memory of rank ", owner), errno);
      gone(std::strerror(errno));
    };
    const std::string path = join("/proc/", peer.pid, "/fd/", peer.file.descriptor);
    struct stat found;
    check(stat(path.c_str(), &found));  // before opening it, because opening another file could
                                        // have side effects
    if (!same_file(peer.file, found)) gone("another file has its descriptor");
    const bool writes = access == Access::kWrite;
    const FileDescriptor fd(
        open(path.c_str(), (writes ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    check(fd.get());
    check(fstat(fd.get(), &found));
    const int seals = fcntl(fd.get(), F_GET_SEALS);
    if (!same_file(peer.file, found) || seals < 0 || !(seals & F_SEAL_SHRINK))
      gone("another file has its descriptor");
    const size_t offset = offset_of(id), end = static_cast<size_t>(found.st_size);
    require(id > 0 && offset <= end && bytes <= end - offset, CGX_PEER_FAILED, "rank ", owner,
            " sent the size of segment ", id, " has ", bytes,
            " bytes, beyond the end of its memory");
    return std::make_unique<Mapping>(fd.get(), offset, bytes,
                                     writes ? PROT_READ | PROT_WRITE : PROT_READ);
  }

  const FileDescriptor fd_;
  MemoryFile file_;
  size_t bytes_ = 0;  // size of the file
  std::vector<Peer> peers_;
};

bool same_host(const LocalOffer& a, const LocalOffer& b) { return a.memory == b.memory; }

}  // namespace

std::unique_ptr<Connector> make_shm_connector(int rank, int size) {
  return std::make_unique<SharedMemoryConnector>(
      "shm", rank, size, std::make_unique<MemoryFileStore>(), same_host, "runs on another host");
}

}  // namespace cgx
