// Control messages: whatever bytes come, they are read as a message or refused with an Error. What
// is read and written again is the same bytes.
#include "base/status.h"
#include "header.h"
#include "input.h"

using namespace cgx;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  Bytes message;
  if (input.flag()) {
    Header header;
    header.key = {std::string(input.below(40), 'n'), input.number<uint64_t>()};
    header.serial = input.number<uint32_t>();
    header.eager = input.bytes(input.below(64));
    header.refused = {static_cast<cgx_status_t>(input.below(4)), std::string(input.below(40), 'r')};
    message = input.spoiled(write_header(header));
  } else {
    message = input.bytes(size - 1);
  }
  try {
    if (control_kind(message) == ControlKind::kAbort) {
      FUZZ_CHECK(write_abort(read_abort(message)) == message);
      return 0;
    }
    const Header header = read_header(message);
    const Header again = read_header(write_header(header));
    FUZZ_CHECK(again.key == header.key && again.serial == header.serial);
    FUZZ_CHECK(again.eager == header.eager && again.refused.message == header.refused.message);
    static_cast<void>(difference(header.agreement, Agreement{}));
  } catch (const Error&) {
  }
  return 0;
}
