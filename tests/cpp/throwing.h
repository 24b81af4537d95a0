// Expected errors, for programs that end at the first failure (ranks.h).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "ranks.h"

namespace cgx {

// Runs `work`, which must throw an Error of this status, and returns its text.
inline std::string error_of(const std::function<void()>& work, cgx_status_t status) {
  try {
    work();
  } catch (const Error& error) {
    CHECK(error.status() == status, "status %d: %s", error.status(), error.what());
    return error.what();
  }
  CHECK(false, "no error, but status %d was expected", status);
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// As above, and requires that the text contains all parts.
inline void throws(cgx_status_t status, const std::vector<std::string>& parts,
                   const std::function<void()>& work) {
  const std::string text = error_of(work, status);
  for (const std::string& part : parts)
    CHECK(contains(text, part), "'%s' is missing in: %s", part.c_str(), text.c_str());
}

}  // namespace cgx
