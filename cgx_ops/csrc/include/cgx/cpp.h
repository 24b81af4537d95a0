/* C++ helpers for callers of cgx.h. They are inline, so exceptions are thrown and caught in the
 * caller's module. */
#ifndef CGX_CPP_H_
#define CGX_CPP_H_

#include <stdexcept>
#include <string>

#include "cgx/cgx.h"

namespace cgx {

/** A status other than CGX_OK, with the text of cgx_last_error(). */
class StatusError : public std::runtime_error {
 public:
  StatusError(cgx_status_t status, const std::string& text)
      : std::runtime_error(text), status(status) {}
  cgx_status_t status;
};

/** Throw StatusError unless status is CGX_OK. Call it on the thread that got the status. */
inline void check(cgx_status_t status) {
  if (status != CGX_OK) throw StatusError(status, cgx_last_error());
}

/** Return the config that cgx_config_parse makes of a text; by default, the default config. Throws
 * StatusError for an invalid text. */
inline cgx_config_t config_of(const char* text = "") {
  cgx_config_t config;
  check(cgx_config_parse(text, &config));
  return config;
}

/** Return a zero-initialized struct with struct_size set: auto c = cgx::make<cgx_collective_t>();
 */
template <typename T>
T make() {
  T t{};
  t.struct_size = sizeof(T);
  return t;
}

}  // namespace cgx
#endif /* CGX_CPP_H_ */
