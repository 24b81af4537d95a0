// What every function of cgx.h is wrapped in: failures become a status, and this thread's error
// text and field.
#pragma once

#include <atomic>
#include <new>
#include <string>

#include "base/float_mode.h"
#include "base/status.h"
#include "cgx/cgx.h"

namespace cgx {

inline thread_local std::string last_error;
inline thread_local int32_t last_error_field = Error::kNoField;
inline std::atomic<bool> forked{false};

// A forked child is refused what this is called for: the threads, the memory, the MPI and the CUDA
// of its parent are not its own.
inline void refuse_forked() {
  require(!forked, CGX_CLOSED,
          "this process is a forked child of one that uses cgx: communicators and GPUs belong to "
          "the parent; start workers with spawn to use cgx in them");
}

// Arithmetic on arguments alone: it uses no thread but the caller's and no lock, so that it works
// in a forked child too.
template <typename Work>
cgx_status_t guarded_arithmetic(Work&& work) {
  const FloatMode mode;
  try {
    last_error.clear();
    last_error_field = Error::kNoField;
    work();
    return CGX_OK;
  } catch (const Error& error) {
    last_error = error.what();
    last_error_field = error.field();
    return error.status();
  } catch (const std::bad_alloc&) {
    last_error = "out of memory";
    return CGX_SYSTEM;
  } catch (const std::exception& error) {
    last_error = error.what();
    return CGX_INTERNAL;
  } catch (...) {
    last_error = "unknown exception";
    return CGX_INTERNAL;
  }
}

template <typename Work>
cgx_status_t guarded(Work&& work) {
  return guarded_arithmetic([&] {
    refuse_forked();
    work();
  });
}

// oldest: the size that the struct had when it first appeared; a caller built then still gives that
// one, and what was appended since is not his.
template <typename T>
void check_struct(const T* given, const char* type, size_t oldest = sizeof(T)) {
  require(given != nullptr, CGX_INVALID_ARGUMENT, type, " is a null pointer");
  require(given->struct_size >= oldest && given->struct_size <= sizeof(T), CGX_INVALID_ARGUMENT,
          type, ".struct_size is ", given->struct_size, ", this libcgx (", CGX_VERSION,
          ") expects ", sizeof(T), ": caller and library are of different versions");
}

}  // namespace cgx
