// The handshake by which two ends of a TCP connection prove that they are ranks of one
// communicator. It does not use sockets: take() consumes received bytes and returns the bytes to
// send.
//
//   1. The acceptor sends a challenge: a greeting and a nonce.
//   2. The dialer answers with its rank, its own nonce and a proof.
//   3. The acceptor confirms with another proof.
//
// A proof is a keyed hash of both nonces, both ranks and the side. The key is the communicator's.
// Unauthenticated peers receive only a nonce, and at most 32 bytes are read from them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "base/bytes.h"
#include "base/siphash.h"

namespace cgx {

using Nonce = std::array<uint64_t, 2>;

// Draws a nonce from the kernel's random generator. Throws Error(CGX_SYSTEM).
Nonce random_nonce();

class Handshake {
 public:
  enum class Side { kDials, kAccepts };
  // `peer`: the rank that is dialed. An accepted peer sends its rank.
  static Handshake dial(const SipKey& key, int rank, int peer) {
    return {Side::kDials, key, rank, peer};
  }
  static Handshake accept(const SipKey& key, int rank, int size) {
    return {Side::kAccepts, key, rank, size};
  }

  enum class State { kGoing, kProven, kRefused };
  State state() const { return state_; }
  int peer() const { return peer_; }  // valid once proven

  // Bytes to send first.
  Bytes opening() const;
  // The number of bytes that take() needs next. Later bytes do not belong to the handshake.
  size_t awaits() const;
  // Consumes exactly awaits() bytes and returns the bytes to send.
  Bytes take(std::span<const std::byte> bytes);

 private:
  // `number`: the peer's rank (dialer), or the number of ranks (acceptor).
  Handshake(Side side, const SipKey& key, int rank, int number)
      : side_(side),
        key_(key),
        rank_(rank),
        size_(side == Side::kAccepts ? number : 0),
        peer_(side == Side::kDials ? number : -1),
        nonce_(random_nonce()) {}

  uint64_t proof(Side side, const Nonce& theirs) const;
  Bytes refuse();

  const Side side_;
  const SipKey key_;
  const int rank_, size_;
  int peer_;
  const Nonce nonce_;
  Nonce theirs_{};
  bool answered_ = false;  // dialer: waiting for the confirmation
  State state_ = State::kGoing;
};

}  // namespace cgx
