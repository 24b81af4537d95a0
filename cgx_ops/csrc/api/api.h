// Wraps every function of cgx.h: converts exceptions to a status, and sets this thread's error text
// and field.
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

// Throws in a forked child: threads, memory, MPI and CUDA of the parent do not work there.
inline void refuse_forked() {
  require(!forked, CGX_CLOSED,
          "this process was forked from one that uses cgx: communicators and GPUs belong to the "
          "parent; start workers with spawn to use cgx in them");
}

// For functions that only compute on their arguments. They use no other threads and no locks, so
// they work in a forked child.
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

// `oldest`: the size of the struct when it first appeared. Callers built with those headers pass
// this size, and do not have later fields.
template <typename T>
void check_struct(const T* given, const char* type, size_t oldest = sizeof(T)) {
  require(given != nullptr, CGX_INVALID_ARGUMENT, type, " is a null pointer");
  require(given->struct_size >= oldest && given->struct_size <= sizeof(T), CGX_INVALID_ARGUMENT,
          type, ".struct_size is ", given->struct_size, ", this libcgx (", CGX_VERSION,
          ") expects ", sizeof(T), ": caller and library have different versions");
}

}  // namespace cgx
