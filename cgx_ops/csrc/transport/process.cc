#include "transport/process.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <unordered_map>

namespace cgx {

std::shared_ptr<Process> Process::of(pid_t pid) {
  static std::mutex mutex;
  static auto* watched = new std::unordered_map<pid_t, std::weak_ptr<Process>>;
  const std::lock_guard lock(mutex);
  std::erase_if(*watched, [](const auto& entry) { return entry.second.expired(); });
  auto process = (*watched)[pid].lock();
  // Otherwise the pid may have been reused, or a descriptor may be available now.
  if (process && process->has_descriptor() && process->alive()) return process;
  process.reset(new Process(pid));
  (*watched)[pid] = process;
  return process;
}

Process::Process(pid_t pid)
    : pid_(pid), pidfd_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {}

bool Process::alive() const {
  if (pidfd_.get() < 0) return kill(pid_, 0) == 0 || errno == EPERM;
  pollfd ended{pidfd_.get(), POLLIN, 0};
  return poll(&ended, 1, 0) <= 0;  // a signal may interrupt it
}

}  // namespace cgx
