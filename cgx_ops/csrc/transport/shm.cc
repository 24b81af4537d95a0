// Ranks that are processes of one host: segments are memory files (memfd) that peers open through
// /proc/<pid>/fd. They have no name in /dev/shm, so no two jobs can meet and nothing is left behind
// when a process ends, however it ends.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/status.h"
#include "transport/shared_memory.h"

namespace cgx {
namespace {

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

class Mapping {
 public:
  Mapping(int fd, size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    require(data_ != MAP_FAILED, CGX_SYSTEM, "cannot map ", bytes,
            " bytes of shared memory: ", std::strerror(errno));
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { munmap(data_, bytes_); }
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_;
  size_t bytes_;
};

class MemoryFileStore : public SegmentStore {
 public:
  Segment create(size_t bytes) override {
    FileDescriptor fd(memfd_create("cgx", MFD_CLOEXEC));
    require(fd.get() >= 0 && ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0, CGX_SYSTEM,
            "cannot make ", bytes, " bytes of shared memory: ", std::strerror(errno));
    auto mapping = std::make_unique<Mapping>(fd.get(), bytes);
    // A serial number above the descriptor: a reused descriptor is not taken for the old segment.
    const uint64_t id = static_cast<uint64_t>(fd.get()) | (++serial_ << 32);
    std::byte* data = mapping->data();
    own_.push_back({std::move(fd), std::move(mapping)});
    return {data, bytes, id};
  }

  std::byte* map(int owner, uint64_t id, size_t bytes) override {
    auto& mapping = peers_.at(owner).mapped[id];
    if (!mapping) {
      const std::string path = join("/proc/", peers_[owner].pid, "/fd/", static_cast<uint32_t>(id));
      const FileDescriptor fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
      require(fd.get() >= 0, CGX_PEER_FAILED, "cannot open the shared memory of rank ", owner,
              " (process ", peers_[owner].pid, "): ", std::strerror(errno));
      mapping = std::make_unique<Mapping>(fd.get(), bytes);
    }
    return mapping->data();
  }

  bool alive(int peer) override {
    const Process& process = peers_.at(peer);
    if (process.pidfd.get() < 0)
      return kill(static_cast<pid_t>(process.pid), 0) == 0 || errno == EPERM;
    pollfd ended{process.pidfd.get(), POLLIN, 0};
    return poll(&ended, 1, 0) <= 0;  // a signal may interrupt it
  }

  void meet(const std::vector<LocalOffer>& peers) override {
    for (const auto& peer : peers) {
      const auto pid = static_cast<pid_t>(peer.pid);
      peers_.push_back(
          {pid, FileDescriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))), {}});
    }
  }

 private:
  struct Own {
    FileDescriptor fd;
    std::unique_ptr<Mapping> mapping;
  };
  struct Process {
    int64_t pid;
    FileDescriptor pidfd;  // < 0 on kernels without it
    std::unordered_map<uint64_t, std::unique_ptr<Mapping>> mapped;
  };
  uint64_t serial_ = 0;
  std::vector<Own> own_;
  std::vector<Process> peers_;
};

bool same_host(const LocalOffer& a, const LocalOffer& b) { return a.memory == b.memory; }

}  // namespace

std::unique_ptr<Connector> make_shm_connector(int rank, int size) {
  return std::make_unique<SharedMemoryConnector>(
      "shm", rank, size, std::make_unique<MemoryFileStore>(), same_host, "runs on another host");
}

}  // namespace cgx
