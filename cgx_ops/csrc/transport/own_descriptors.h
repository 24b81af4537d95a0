// Descriptors that are this process's own: a forked child (a data loader) gets /dev/null in their
// place. A connection that children keep open would outlive a rank that is killed, and its peers
// would wait for their deadline.
#pragma once

#include "transport/file_descriptor.h"

namespace cgx {

class OwnDescriptor {
 public:
  explicit OwnDescriptor(FileDescriptor fd = FileDescriptor());
  OwnDescriptor(OwnDescriptor&&) noexcept = default;
  OwnDescriptor& operator=(OwnDescriptor&& other) noexcept;
  ~OwnDescriptor();
  const FileDescriptor& fd() const { return fd_; }

 private:
  FileDescriptor fd_;
};

}  // namespace cgx
