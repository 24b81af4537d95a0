#include "engine/header.h"

#include <cstring>

#include "base/status.h"

namespace cgx {
namespace {

enum class Kind : uint8_t { kHeader = 1, kAbort = 2, kCancel = 3, kAsk = 4, kAnswer = 5 };

struct FixedHeader {
  uint32_t kind_and_turn;  // kind is the first byte
  uint32_t serial;
  uint64_t occurrence;
  uint32_t name_bytes;
  uint32_t eager_bytes;
  uint32_t refusal_bytes;
  int32_t refusal_status;
  Agreement agreement;
};

static_assert(sizeof(FixedHeader) == kHeaderBytes);

struct FixedCancel {
  uint8_t kind;
  uint8_t reserved[3];
  uint32_t serial;
  int32_t status;
};

struct FixedAbort {
  uint8_t kind;
  uint8_t reserved[3];
  uint32_t count;  // of the serials that follow; the reason comes after them
};

struct FixedInquiry {  // an ask; or an answer, followed by ranks
  uint8_t kind;
  uint8_t reserved[3];
  uint32_t serial;
};

// Writes a message: the fixed part, then fields of any length.
template <typename Fixed, typename... Fields>
Bytes write(const Fixed& fixed, const Fields&... fields) {
  Bytes message;
  message.reserve((sizeof(fixed) + ... + std::as_bytes(std::span(fields)).size()));
  const auto add = [&](std::span<const std::byte> bytes) {
    message.insert(message.end(), bytes.begin(), bytes.end());
  };
  add(as_bytes(fixed));
  (add(std::as_bytes(std::span(fields))), ...);
  return message;
}

// Reads fields from a message, with bounds checks.
class Reader {
 public:
  Reader(int source, std::span<const std::byte> message) : source_(source), rest_(message) {}

  std::span<const std::byte> bytes(size_t count) {
    require(count <= rest_.size(), CGX_PEER_FAILED, "rank ", source_,
            " sent a truncated control message: ", rest_.size(), " bytes instead of ", count);
    const auto taken = rest_.first(count);
    rest_ = rest_.subspan(count);
    return taken;
  }
  template <typename T>
  T fixed() {
    return from_bytes<T>(bytes(sizeof(T)), "a control message");
  }
  std::string text(size_t count) {
    const auto taken = bytes(count);
    return {reinterpret_cast<const char*>(taken.data()), taken.size()};
  }
  std::string rest() { return text(rest_.size()); }
  bool empty() const { return rest_.empty(); }
  void require_end() const {
    require(rest_.empty(), CGX_PEER_FAILED, "rank ", source_,
            " sent a control message that is too long by ", rest_.size(), " bytes");
  }
  cgx_status_t status(int32_t value) const {
    require(value >= CGX_OK && value <= CGX_INTERNAL, CGX_PEER_FAILED, "rank ", source_,
            " sent the status ", value);
    return static_cast<cgx_status_t>(value);
  }

 private:
  const int source_;
  std::span<const std::byte> rest_;
};

Header read_header(Reader reader, int source) {
  const auto fixed = reader.fixed<FixedHeader>();
  require(fixed.name_bytes <= kLongestName, CGX_PEER_FAILED, "rank ", source, " sent a name of ",
          fixed.name_bytes, " bytes");
  Header header;
  header.serial = fixed.serial;
  header.turn = fixed.kind_and_turn >> 8;
  header.agreement = fixed.agreement;
  header.key = {reader.text(fixed.name_bytes), fixed.occurrence};
  header.eager = to_bytes(reader.bytes(fixed.eager_bytes));
  header.refused = {reader.status(fixed.refusal_status), reader.text(fixed.refusal_bytes)};
  reader.require_end();
  return header;
}

Cancel read_cancel(Reader reader, int source) {
  const auto fixed = reader.fixed<FixedCancel>();
  const cgx_status_t status = reader.status(fixed.status);
  require(status != CGX_OK, CGX_PEER_FAILED, "rank ", source,
          " cancels a collective without an error");
  return {fixed.serial, {status, reader.rest()}};
}

Abort read_abort(Reader reader) {
  Abort abort;
  for (auto left = reader.fixed<FixedAbort>().count; left > 0; --left)
    abort.serials.push_back(reader.fixed<uint32_t>());
  abort.reason = reader.rest();
  return abort;
}

Ask read_ask(Reader reader) {
  const auto fixed = reader.fixed<FixedInquiry>();
  reader.require_end();
  return {fixed.serial};
}

Answer read_answer(Reader reader) {
  Answer answer{reader.fixed<FixedInquiry>().serial, {}};
  while (!reader.empty()) answer.waits_for.push_back(reader.fixed<int32_t>());
  return answer;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Key& key) {
  if (key.name.empty()) return out << "call " << key.occurrence;
  out << "'" << key.name.substr(key.name.starts_with(kInternal)) << "'";
  return key.occurrence == Key::kNext ? out : out << " (use " << key.occurrence << ")";
}

Bytes write_header(const Header& header) {
  FixedHeader fixed{};
  fixed.kind_and_turn = static_cast<uint32_t>(Kind::kHeader) | header.turn % kTurns << 8;
  fixed.serial = header.serial;
  fixed.occurrence = header.key.occurrence;
  fixed.name_bytes = static_cast<uint32_t>(header.key.name.size());
  fixed.eager_bytes = static_cast<uint32_t>(header.eager.size());
  fixed.refusal_bytes = static_cast<uint32_t>(header.refused.message.size());
  fixed.refusal_status = header.refused.status;
  fixed.agreement = header.agreement;
  return write(fixed, header.key.name, header.eager, header.refused.message);
}

Bytes write_cancel(const Cancel& cancel) {
  FixedCancel fixed{};
  fixed.kind = static_cast<uint8_t>(Kind::kCancel);
  fixed.serial = cancel.serial;
  fixed.status = cancel.reason.status;
  return write(fixed, cancel.reason.message);
}

Bytes write_abort(const Abort& abort) {
  const FixedAbort fixed{
      static_cast<uint8_t>(Kind::kAbort), {}, static_cast<uint32_t>(abort.serials.size())};
  return write(fixed, abort.serials, abort.reason);
}

Bytes write_ask(const Ask& ask) {
  return write(FixedInquiry{static_cast<uint8_t>(Kind::kAsk), {}, ask.serial});
}

Bytes write_answer(const Answer& answer) {
  return write(FixedInquiry{static_cast<uint8_t>(Kind::kAnswer), {}, answer.serial},
               answer.waits_for);
}

Message read_message(int source, std::span<const std::byte> message) {
  const Reader reader(source, message);
  switch (const auto kind = Reader(reader).fixed<Kind>()) {
    case Kind::kHeader:
      return read_header(reader, source);
    case Kind::kCancel:
      return read_cancel(reader, source);
    case Kind::kAbort:
      return read_abort(reader);
    case Kind::kAsk:
      return read_ask(reader);
    case Kind::kAnswer:
      return read_answer(reader);
    default:
      fail(CGX_PEER_FAILED, "rank ", source, " sent a control message of kind ",
           static_cast<int>(kind));
  }
}

}  // namespace cgx
