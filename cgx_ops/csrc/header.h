// The engine's control messages: a header announces a collective to every peer, an abort tells that
// this rank has closed the communicator.
//
// A header is the first message of a collective: its key, what all ranks must agree on, and, when
// it is small, its values.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "plan.h"
#include "transport/transport.h"

namespace cgx {

// What identifies a collective on a communicator, whatever the order in which ranks start it.
struct Key {
  std::string name;  // "" for calls that follow the communicator's program order
  uint64_t occurrence = 0;
  bool operator==(const Key&) const = default;
  std::string text() const;
};
struct KeyHash {
  size_t operator()(const Key& key) const {
    return std::hash<std::string>()(key.name) * 31 + key.occurrence;
  }
};

inline constexpr size_t kLongestName = 1024;

// Why a rank takes no part in a collective; CGX_OK: it does.
struct Refused {
  cgx_status_t status = CGX_OK;
  std::string message;
};

struct Header {
  Key key;
  uint32_t serial = 0;  // the sender's number of this collective: names its channels
  Agreement agreement;
  Bytes eager;
  Refused refused;
};

enum class ControlKind : uint8_t { kHeader = 1, kAbort = 2 };

Bytes write_header(const Header& header);
Bytes write_abort(const std::string& reason);

ControlKind control_kind(std::span<const std::byte> message);
Header read_header(std::span<const std::byte> message);
std::string read_abort(std::span<const std::byte> message);

}  // namespace cgx
