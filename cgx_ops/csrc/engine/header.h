// The engine's control messages.
//
//   header   the first message of a collective, to every peer: its key, the arguments that ranks
//            must agree on and, if they are short, its values
//   cancel   this rank cannot continue a collective that all have agreed on, and why
//   abort    this rank has closed the communicator, why, and the collectives that end with it
//   ask      a deadline has passed: which ranks do you wait for in this collective?
//   answer   these ranks
//
// read_message() validates every message from a peer before any of it is used.
#pragma once

#include <cstdint>
#include <ostream>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "plan.h"
#include "transport/transport.h"

namespace cgx {

// Identifies a collective on a communicator, in whatever order ranks start them.
struct Key {
  // The occurrence of a named collective whose uses the caller does not count: each rank's next use
  // of the name.
  static constexpr uint64_t kNext = UINT64_MAX;

  std::string name;  // "" for calls matched in program order
  uint64_t occurrence = 0;
  bool operator==(const Key&) const = default;
  // Prints "call 3" or "'grads' (use 2)". Checks take a key and format it only on failure, because
  // formatting costs more than the check.
  friend std::ostream& operator<<(std::ostream& out, const Key& key);
};
struct KeyHash {
  size_t operator()(const Key& key) const {
    return std::hash<std::string>()(key.name) * 31 + key.occurrence;
  }
};

inline constexpr size_t kLongestName = 1024;
inline constexpr char kInternal = '\x01';  // begins the core's own names; error texts omit it

// Why a rank refuses a collective; CGX_OK: it does not.
struct Refused {
  cgx_status_t status = CGX_OK;
  std::string message;
};

inline constexpr uint32_t kTurns = 1u << 24;

struct Header {
  Key key;
  uint32_t serial = 0;  // the sender's serial of this collective, which identifies its channels
  uint32_t turn = 0;    // headers that the sender sent to this receiver before, modulo kTurns
  Agreement agreement;
  Bytes eager;
  Refused refused;
};

struct Cancel {
  uint32_t serial;  // the sender's serial of the collective
  Refused reason;
};

struct Abort {
  std::string reason;
  std::vector<uint32_t> serials;  // the sender's serials of the collectives that end with it
};
// Longer lists are split into several messages.
inline constexpr size_t kMostAborted = 2048;

struct Ask {
  uint32_t serial;  // the asker's serial of the collective
};

struct Answer {
  uint32_t serial;  // as asked
  std::vector<int32_t> waits_for;
};

using Message = std::variant<Header, Cancel, Abort, Ask, Answer>;

Bytes write_header(const Header& header);
Bytes write_cancel(const Cancel& cancel);
Bytes write_abort(const Abort& abort);
Bytes write_ask(const Ask& ask);
Bytes write_answer(const Answer& answer);

// Throws Error(CGX_PEER_FAILED), which names the sender, if the message is malformed.
Message read_message(int source, std::span<const std::byte> message);

}  // namespace cgx
