#include "transport/tcp_handshake.h"

#include <sys/random.h>

#include <cerrno>
#include <cstring>

#include "base/status.h"

namespace cgx {
namespace {

constexpr std::array<char, 8> kGreeting{'c', 'g', 'x', ' ', 't', 'c', 'p', '1'};

struct Challenge {
  std::array<char, 8> greeting;
  Nonce nonce;
};
struct Answer {
  uint32_t rank;
  uint32_t zero;  // so that all bytes are defined
  Nonce nonce;
  uint64_t proof;
};
struct Confirmation {
  uint64_t proof;
};

}  // namespace

Nonce random_nonce() {
  Nonce nonce;
  require(getrandom(nonce.data(), sizeof(nonce), 0) == sizeof(nonce), CGX_SYSTEM,
          "cannot draw random bits: ", std::strerror(errno));
  return nonce;
}

Bytes Handshake::opening() const {
  if (side_ == Side::kDials) return {};
  return to_bytes(Challenge{kGreeting, nonce_});
}

size_t Handshake::awaits() const {
  if (state_ != State::kGoing) return 0;
  if (side_ == Side::kAccepts) return sizeof(Answer);
  return answered_ ? sizeof(Confirmation) : sizeof(Challenge);
}

// The side is hashed too, so that neither side can reflect a proof.
uint64_t Handshake::proof(Side side, const Nonce& theirs) const {
  const bool dials = side_ == Side::kDials;
  const struct {
    uint64_t side;
    Nonce of_dialer, of_acceptor;
    int64_t dialer, acceptor;
  } fields{static_cast<uint64_t>(side), dials ? nonce_ : theirs, dials ? theirs : nonce_,
           dials ? rank_ : peer_, dials ? peer_ : rank_};
  return siphash(key_, as_bytes(fields));
}

Bytes Handshake::refuse() {
  state_ = State::kRefused;
  return {};
}

Bytes Handshake::take(std::span<const std::byte> bytes) {
  if (side_ == Side::kAccepts) {
    const auto answer = from_bytes<Answer>(bytes, "an answer");
    if (answer.rank >= static_cast<uint32_t>(size_)) return refuse();
    peer_ = static_cast<int>(answer.rank);
    if (answer.zero != 0 || answer.proof != proof(Side::kDials, answer.nonce)) return refuse();
    state_ = State::kProven;
    return to_bytes(Confirmation{proof(Side::kAccepts, answer.nonce)});
  }
  if (answered_) {
    const auto confirmation = from_bytes<Confirmation>(bytes, "a confirmation");
    if (confirmation.proof != proof(Side::kAccepts, theirs_)) return refuse();
    state_ = State::kProven;
    return {};
  }
  const auto challenge = from_bytes<Challenge>(bytes, "a challenge");
  if (challenge.greeting != kGreeting) return refuse();
  theirs_ = challenge.nonce;
  answered_ = true;
  return to_bytes(Answer{static_cast<uint32_t>(rank_), 0, nonce_, proof(Side::kDials, theirs_)});
}

}  // namespace cgx
