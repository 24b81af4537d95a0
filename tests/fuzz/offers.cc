// The offers that ranks exchange to connect. A peer's offer is this rank's own, a corrupted one, or
// any bytes. The ranks connect, or an Error is raised.
//
// Only the thread transport is tested, since others would open any file that an offer names.
#include "base/status.h"
#include "connect.h"
#include "input.h"

using namespace cgx;

namespace {

constexpr int kSize = 2;
constexpr std::chrono::seconds kTimeout(1);

Bytes of_peer(Input& input, const Bytes& mine) {
  return input.below(4) == 0 ? input.bytes(input.number<uint16_t>() % 1024) : input.corrupted(mine);
}

void connect_threads(Input& input) {
  const auto connector = make_thread_connector(0, kSize);
  const Bytes mine = connector->offer();
  const std::vector<Bytes> offers{mine, of_peer(input, mine)};
  if (!connector->refusal(offers).empty()) return;
  connector->connect(offers, {{true, true}, kTimeout})->leave(true, "");
}

// Requests the transport MPI, which has no offer without MPI. So this ends after the first
// exchange.
void bootstrap(Input& input) {
  const Allgather allgather = [&](const Bytes& mine) {
    return std::vector<Bytes>{mine, of_peer(input, mine)};
  };
  cgx::connect("fuzzed", 0, 0, kSize, allgather, "MPI", kTimeout);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  try {
    input.flag() ? connect_threads(input) : bootstrap(input);
  } catch (const Error&) {
  }
  return 0;
}
