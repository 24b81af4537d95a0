// The engine's control messages.
//
//   header   the first message of a collective, to every peer: its key, what all ranks must agree
//            on, and, when it is small, its values
//   cancel   this rank cannot go on with a collective that all have agreed on, and why
//   abort    this rank has closed the communicator, why, and which collectives end with it
//   ask      a deadline has passed here: for whom do you wait in this collective?
//   answer   for these
//
// read_message() checks all that a peer has written before anything of it is used.
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

// What identifies a collective on a communicator, whatever the order in which ranks start it.
struct Key {
  // For names whose uses nobody counts: each rank's next one, in its own order.
  static constexpr uint64_t kNext = UINT64_MAX;

  std::string name;  // "" for calls that follow the communicator's program order
  uint64_t occurrence = 0;
  bool operator==(const Key&) const = default;
  // In a message, "call 3" or "'grads' (use 2)". Checks are given a key, not its text, which costs
  // more than they do.
  friend std::ostream& operator<<(std::ostream& out, const Key& key);
};
struct KeyHash {
  size_t operator()(const Key& key) const {
    return std::hash<std::string>()(key.name) * 31 + key.occurrence;
  }
};

inline constexpr size_t kLongestName = 1024;
inline constexpr char kInternal = '\x01';  // begins names of the core's own; messages leave it out

// Why a rank takes no part in a collective; CGX_OK: it does.
struct Refused {
  cgx_status_t status = CGX_OK;
  std::string message;
};

inline constexpr uint32_t kTurns = 1u << 24;

struct Header {
  Key key;
  uint32_t serial = 0;  // the sender's number of this collective: names its channels
  uint32_t turn = 0;    // headers that the sender sent to this receiver before, modulo kTurns
  Agreement agreement;
  Bytes eager;
  Refused refused;
};

struct Cancel {
  uint32_t serial;  // the sender's number of the collective
  Refused reason;
};

struct Abort {
  std::string reason;
  std::vector<uint32_t> serials;  // the sender's numbers of the collectives that end with it
};
// More go into several messages.
inline constexpr size_t kMostAborted = 2048;

struct Ask {
  uint32_t serial;  // the asker's number of the collective
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

// Throws Error(CGX_PEER_FAILED), which names the sender, for what no rank writes.
Message read_message(int source, std::span<const std::byte> message);

}  // namespace cgx
