/* The inline C++ face of cgx.h: cgx::check() throws in the module of its caller. */
#ifndef CGX_FACE_H_
#define CGX_FACE_H_

#include <stdexcept>
#include <string>

#include "cgx/cgx.h"

namespace cgx {

class StatusError : public std::runtime_error {
 public:
  StatusError(cgx_status_t status, const std::string& text)
      : std::runtime_error(text), status(status) {}
  cgx_status_t status;
};

inline void check(cgx_status_t status) {
  if (status != CGX_OK) throw StatusError(status, cgx_last_error());
}

/* cgx_config_parse; by default the default config. */
inline cgx_config_t config_of(const char* text = "") {
  cgx_config_t config;
  check(cgx_config_parse(text, &config));
  return config;
}

/* Zero-initialised with struct_size set: auto c = cgx::make<cgx_collective_t>(); */
template <typename T>
T make() {
  T t{};
  t.struct_size = sizeof(T);
  return t;
}

}  // namespace cgx
#endif /* CGX_FACE_H_ */
