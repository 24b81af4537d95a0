// What ranks tell each other while they connect: peers' blobs are this rank's own, spoiled, or any
// bytes. A communicator comes up, or an Error says why not.
//
// Only threads' transport is tried: processes' would open whatever files an offer names.
#include "base/status.h"
#include "connect.h"
#include "input.h"

using namespace cgx;

namespace {

constexpr int kSize = 2;
constexpr std::chrono::seconds kTimeout(1);

Bytes of_peer(Input& input, const Bytes& mine) {
  return input.below(4) == 0 ? input.bytes(input.number<uint16_t>() % 1024) : input.spoiled(mine);
}

void connect_threads(Input& input) {
  const auto connector = make_thread_connector(0, kSize);
  const Bytes mine = connector->offer();
  const std::vector<Bytes> offers{mine, of_peer(input, mine)};
  if (!connector->refusal(offers).empty()) return;
  connector->connect(offers, {{true, true}, kTimeout})->leave(true, "");
}

// Without MPI no offer of its transport is made, so this ends after the words before.
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
