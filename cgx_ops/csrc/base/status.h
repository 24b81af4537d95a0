// Failures inside the core are an Error with a status. api.h converts it to a status code, the
// field at fault and a thread-local text, so that no exception leaves the library.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "cgx/status.h"

namespace cgx {

class Error : public std::runtime_error {
 public:
  static constexpr int32_t kNoField = -1;

  Error(cgx_status_t status, const std::string& text, int32_t field = kNoField)
      : std::runtime_error(text), status_(status), field_(field) {}
  cgx_status_t status() const { return status_; }
  // See cgx_last_error_field().
  int32_t field() const { return field_; }

 private:
  cgx_status_t status_;
  int32_t field_;
};

template <typename... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Throws Error(status, all parts concatenated).
template <typename... Parts>
[[noreturn]] void fail(cgx_status_t status, const Parts&... parts) {
  throw Error(status, join(parts...));
}

template <typename... Parts>
void require(bool condition, cgx_status_t status, const Parts&... parts) {
  if (!condition) [[unlikely]]
    fail(status, parts...);
}

}  // namespace cgx
