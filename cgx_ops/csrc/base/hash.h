// FNV-1a, 64 bits. Equal on all ranks and builds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace cgx {

// To hash several ranges, pass the previous result as `hash`.
inline uint64_t fnv1a(std::span<const std::byte> bytes, uint64_t hash = 0xcbf29ce484222325) {
  for (const std::byte byte : bytes) hash = (hash ^ static_cast<uint64_t>(byte)) * 0x100000001b3;
  return hash;
}

}  // namespace cgx
