// CHECK for programs that continue after a failure: main() ends with `return report()`.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <string>

#include "base/status.h"

namespace cgx::test {

// With sanitizers, tests take several times as long, so some run fewer cells of their grids.
#if defined(CGX_SANITIZED)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

inline std::atomic<int64_t> passed = 0, failed = 0;

inline void check(bool condition, const char* text, int line, const std::string& where) {
  ++(condition ? passed : failed);
  if (!condition && failed <= 20)
    std::fprintf(stderr, "line %d: %s is false: %s\n", line, text, where.c_str());
}
#define CHECK(condition, where) ::cgx::test::check((condition), #condition, __LINE__, (where))

// Prints how many checks passed, followed by `on_what`; returns the exit status, 1 if any failed.
inline int report(const std::string& on_what = "") {
  if (failed > 0) std::fprintf(stderr, "%ld checks failed\n", static_cast<long>(failed));
  std::printf("%ld checks passed%s\n", static_cast<long>(passed), on_what.c_str());
  return failed == 0 ? 0 : 1;
}

// Runs `call` and returns the text of the Error it throws, "" if it throws none.
template <typename Call>
std::string error_of(const Call& call, cgx_status_t expected) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.status() == expected, error.what());
    return error.what();
  }
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace cgx::test
