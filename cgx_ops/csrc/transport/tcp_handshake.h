// How two ends of a TCP connection prove to each other that they are ranks of one communicator. No
// socket is touched here: bytes come in by take(), and go out from what it returns.
//
//   1. who accepted sends a challenge: a word of greeting and a nonce
//   2. who dialled answers with its rank, a nonce of its own and a proof
//   3. who accepted confirms with another proof
//
// A proof is a keyed hash over both nonces, both ranks and the side; the key is the communicator's.
// Whoever does not know it learns nothing but a nonce, and is read no further than 32 bytes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "base/bytes.h"
#include "base/siphash.h"

namespace cgx {

using Nonce = std::array<uint64_t, 2>;

// From the kernel's generator. Throws Error(CGX_SYSTEM).
Nonce random_nonce();

class Handshake {
 public:
  enum class Side { kDials, kAccepts };
  // peer: whom this rank dials; who is accepted says who it is.
  static Handshake dial(const SipKey& key, int rank, int peer) {
    return {Side::kDials, key, rank, peer};
  }
  static Handshake accept(const SipKey& key, int rank, int size) {
    return {Side::kAccepts, key, rank, size};
  }

  enum class State { kGoing, kProven, kRefused };
  State state() const { return state_; }
  int peer() const { return peer_; }  // once proven

  // What must be sent before anything is awaited.
  Bytes opening() const;
  // How many bytes take() awaits in all; those after them are not the handshake's.
  size_t awaits() const;
  // Takes exactly awaits() bytes; returns what must be sent.
  Bytes take(std::span<const std::byte> bytes);

 private:
  // number: of the peer, or of ranks.
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
  bool answered_ = false;  // who dials: it awaits the confirmation
  State state_ = State::kGoing;
};

}  // namespace cgx
