// SipHash-2-4 (Aumasson and Bernstein, 2012): a keyed hash of short messages. Without the key, its
// values cannot be distinguished from random ones.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace cgx {

using SipKey = std::array<uint64_t, 2>;

inline uint64_t siphash(const SipKey& key, std::span<const std::byte> message) {
  static_assert(std::endian::native == std::endian::little);
  uint64_t v0 = key[0] ^ 0x736f6d6570736575, v1 = key[1] ^ 0x646f72616e646f6d;
  uint64_t v2 = key[0] ^ 0x6c7967656e657261, v3 = key[1] ^ 0x7465646279746573;
  const auto rounds = [&](int count) {
    for (; count > 0; --count) {
      v0 += v1, v2 += v3;
      v1 = std::rotl(v1, 13) ^ v0, v3 = std::rotl(v3, 16) ^ v2;
      v0 = std::rotl(v0, 32);
      v2 += v1, v0 += v3;
      v1 = std::rotl(v1, 17) ^ v2, v3 = std::rotl(v3, 21) ^ v0;
      v2 = std::rotl(v2, 32);
    }
  };
  const auto absorb = [&](uint64_t word) {
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  };
  size_t at = 0;
  for (uint64_t word; at + sizeof(word) <= message.size(); at += sizeof(word)) {
    std::memcpy(&word, message.data() + at, sizeof(word));
    absorb(word);
  }
  uint64_t last = static_cast<uint64_t>(message.size()) << 56;
  for (size_t i = at; i < message.size(); ++i)
    last |= static_cast<uint64_t>(message[i]) << 8 * (i - at);
  absorb(last);
  v2 ^= 0xff;
  rounds(4);
  return v0 ^ v1 ^ v2 ^ v3;
}

}  // namespace cgx
