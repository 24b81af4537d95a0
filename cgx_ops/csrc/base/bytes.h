// Plain structs as bytes and back. What comes from a peer is never longer or shorter than expected:
// from_bytes() checks, once for all.
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

// `what`: said, one after another, where the length is wrong.
template <typename T, typename... What>
T from_bytes(std::span<const std::byte> bytes, const What&... what) {
  static_assert(std::is_trivially_copyable_v<T>);
  require(bytes.size() == sizeof(T), CGX_PEER_FAILED, what..., " has ", bytes.size(),
          " bytes instead of ", sizeof(T));
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

// No more than so many bytes of a text, in whole characters of UTF-8: no Python exception carries
// a part of one.
inline std::string cut(const std::string& text, size_t most) {
  if (text.size() <= most) return text;
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xc0) == 0x80) --most;
  return text.substr(0, most);
}

// Texts in fixed fields: cut where they are too long; a peer's may lack its end.
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
