// Conversion between plain structs and bytes. from_bytes() validates the size of messages from
// peers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/status.h"

namespace cgx {

using Bytes = std::vector<std::byte>;

template <typename T>
std::span<const std::byte> as_bytes(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return {reinterpret_cast<const std::byte*>(&value), sizeof(T)};
}

inline Bytes to_bytes(std::span<const std::byte> span) { return {span.begin(), span.end()}; }

template <typename T>
Bytes to_bytes(const T& value) {
  return to_bytes(as_bytes(value));
}

// `what`: describes the bytes in the error text.
template <typename T, typename... What>
T from_bytes(std::span<const std::byte> bytes, const What&... what) {
  static_assert(std::is_trivially_copyable_v<T>);
  require(bytes.size() == sizeof(T), CGX_PEER_FAILED, what..., " has ", bytes.size(),
          " bytes instead of ", sizeof(T));
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

// Truncates a text to `most` bytes, at a UTF-8 character boundary, so that Python can decode it.
inline std::string cut(const std::string& text, size_t most) {
  if (text.size() <= most) return text;
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xc0) == 0x80) --most;
  return text.substr(0, most);
}

// Texts in fixed-size fields. put_text() truncates; text_of() accepts fields of peers without a
// terminator.
template <size_t N>
void put_text(char (&field)[N], const std::string& text) {
  const std::string whole = cut(text, N - 1);
  std::memset(field, 0, N);
  std::memcpy(field, whole.data(), whole.size());
}

template <size_t N>
std::string text_of(const char (&field)[N]) {
  return {field, strnlen(field, N)};
}

}  // namespace cgx
