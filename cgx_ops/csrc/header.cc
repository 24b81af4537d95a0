#include "header.h"

#include <cstring>

#include "base/status.h"

namespace cgx {
namespace {

struct Fixed {
  uint8_t kind;
  uint8_t reserved[3];
  uint32_t serial;
  uint64_t occurrence;
  uint32_t name_bytes;
  uint32_t eager_bytes;
  uint32_t refusal_bytes;
  int32_t refusal_status;
  Agreement agreement;
};

}  // namespace

std::string Key::text() const {
  return name.empty() ? join("call ", occurrence) : join("'", name, "' (use ", occurrence, ")");
}

Bytes write_header(const Header& header) {
  Fixed fixed{};
  fixed.kind = static_cast<uint8_t>(ControlKind::kHeader);
  fixed.serial = header.serial;
  fixed.occurrence = header.key.occurrence;
  fixed.name_bytes = static_cast<uint32_t>(header.key.name.size());
  fixed.eager_bytes = static_cast<uint32_t>(header.eager.size());
  fixed.refusal_bytes = static_cast<uint32_t>(header.refused.message.size());
  fixed.refusal_status = header.refused.status;
  fixed.agreement = header.agreement;
  Bytes message(sizeof(fixed) + fixed.name_bytes + fixed.eager_bytes + fixed.refusal_bytes);
  std::memcpy(message.data(), &fixed, sizeof(fixed));
  std::memcpy(message.data() + sizeof(fixed), header.key.name.data(), fixed.name_bytes);
  if (fixed.eager_bytes)
    std::memcpy(message.data() + sizeof(fixed) + fixed.name_bytes, header.eager.data(),
                fixed.eager_bytes);
  std::memcpy(message.data() + message.size() - fixed.refusal_bytes, header.refused.message.data(),
              fixed.refusal_bytes);
  return message;
}

Bytes write_abort(const std::string& reason) {
  Bytes message(1 + reason.size());
  message[0] = static_cast<std::byte>(ControlKind::kAbort);
  std::memcpy(message.data() + 1, reason.data(), reason.size());
  return message;
}

ControlKind control_kind(std::span<const std::byte> message) {
  return static_cast<ControlKind>(message[0]);
}

Header read_header(std::span<const std::byte> message) {
  Fixed fixed;
  std::memcpy(&fixed, message.data(), sizeof(fixed));
  require(
      message.size() == sizeof(fixed) + fixed.name_bytes + fixed.eager_bytes + fixed.refusal_bytes,
      CGX_INTERNAL, "malformed header");
  const std::byte* rest = message.data() + sizeof(fixed);
  Header header;
  header.serial = fixed.serial;
  header.agreement = fixed.agreement;
  header.key = {std::string(reinterpret_cast<const char*>(rest), fixed.name_bytes),
                fixed.occurrence};
  rest += fixed.name_bytes;
  header.eager.assign(rest, rest + fixed.eager_bytes);
  rest += fixed.eager_bytes;
  header.refused = {static_cast<cgx_status_t>(fixed.refusal_status),
                    std::string(reinterpret_cast<const char*>(rest), fixed.refusal_bytes)};
  return header;
}

std::string read_abort(std::span<const std::byte> message) {
  return {reinterpret_cast<const char*>(message.data()) + 1, message.size() - 1};
}

}  // namespace cgx
