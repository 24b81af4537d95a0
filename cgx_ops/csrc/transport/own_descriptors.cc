#include "transport/own_descriptors.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace cgx {
namespace {

struct Own {
  std::mutex mutex;
  std::vector<int> descriptors;
  static Own& instance() {
    static auto* own = new Own;  // never destroyed: threads may outlive static destructors
    return *own;
  }
};

// Calls only functions that are allowed between fork() and exec().
void replace_in_child() {
  Own& own = Own::instance();
  const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int fd : own.descriptors) {
    if (nothing < 0)
      close(fd);
    else  // keeps the number in use, so that a later close() cannot hit another file
      dup3(nothing, fd, O_CLOEXEC);
  }
  if (nothing >= 0) close(nothing);
  own.descriptors.clear();
  own.mutex.unlock();
}

void forget(int fd) {
  if (fd < 0) return;
  Own& own = Own::instance();
  const std::lock_guard lock(own.mutex);
  std::erase(own.descriptors, fd);
}

}  // namespace

OwnDescriptor::OwnDescriptor(FileDescriptor fd) : fd_(std::move(fd)) {
  if (fd_.get() < 0) return;
  static const int registered =
      pthread_atfork([] { Own::instance().mutex.lock(); }, [] { Own::instance().mutex.unlock(); },
                     replace_in_child);
  (void)registered;
  Own& own = Own::instance();
  const std::lock_guard lock(own.mutex);
  own.descriptors.push_back(fd_.get());
}

OwnDescriptor& OwnDescriptor::operator=(OwnDescriptor&& other) noexcept {
  forget(fd_.get());
  fd_ = std::move(other.fd_);  // swaps: `other` closes the previous descriptor
  return *this;
}

OwnDescriptor::~OwnDescriptor() { forget(fd_.get()); }

}  // namespace cgx
