// Watches whether another process of this host is alive. All communicators share one descriptor per
// process.
#pragma once

#include <sys/types.h>

#include <memory>

#include "transport/file_descriptor.h"

namespace cgx {

class Process {
 public:
  static std::shared_ptr<Process> of(pid_t pid);

  bool alive() const;

 private:
  bool has_descriptor() const { return pidfd_.get() >= 0; }
  explicit Process(pid_t pid);
  const pid_t pid_;
  const FileDescriptor pidfd_;  // unset if the kernel lacks pidfds, or no descriptor was free
};

}  // namespace cgx
