// File descriptors that forked children do not inherit: a child (such as a data loader) gets
// /dev/null instead. Otherwise a child would keep connections open after its rank was killed, and
// peers would notice only at their deadline.
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
