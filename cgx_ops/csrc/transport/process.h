// Whether another process of this host still runs: one descriptor for each, however many
// communicators ask.
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
  const FileDescriptor pidfd_;  // none on kernels without it, or where no descriptor is left
};

}  // namespace cgx
