// Any bytes are read as a control message of the same length, or rejected with an Error that names
// the sender.
#include "base/status.h"
#include "engine/header.h"
#include "input.h"

using namespace cgx;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  Bytes message;
  if (const int kind = input.below(5); kind == 0) {
    Header header;
    header.key = {std::string(input.below(40), 'n'), input.number<uint64_t>()};
    header.serial = input.number<uint32_t>();
    header.eager = input.bytes(input.below(64));
    header.refused = {static_cast<cgx_status_t>(input.below(4)), std::string(input.below(40), 'r')};
    message = input.corrupted(write_header(header));
  } else if (kind == 1) {
    message = input.corrupted(write_cancel(
        {input.number<uint32_t>(), {static_cast<cgx_status_t>(input.below(4)), "reason"}}));
  } else if (kind == 2) {
    message = input.corrupted(
        write_answer({input.number<uint32_t>(), std::vector<int32_t>(input.below(9), 1)}));
  } else if (kind == 3) {
    message = input.corrupted(write_abort({"reason", std::vector<uint32_t>(input.below(9), 1)}));
  } else {
    message = input.rest();
  }
  try {
    const Message read = read_message(1, message);
    if (const auto* header = std::get_if<Header>(&read)) {
      FUZZ_CHECK(write_header(*header).size() == message.size());
      static_cast<void>(difference(header->agreement, Agreement{}));
    } else if (const auto* cancel = std::get_if<Cancel>(&read)) {
      FUZZ_CHECK(write_cancel(*cancel).size() == message.size());
    } else if (const auto* abort = std::get_if<Abort>(&read)) {
      FUZZ_CHECK(write_abort(*abort).size() == message.size());
    } else if (const auto* ask = std::get_if<Ask>(&read)) {
      FUZZ_CHECK(write_ask(*ask).size() == message.size());
    } else {
      FUZZ_CHECK(write_answer(std::get<Answer>(read)).size() == message.size());
    }
  } catch (const Error& error) {
    FUZZ_CHECK(std::string(error.what()).starts_with("rank 1"));
  }
  return 0;
}
