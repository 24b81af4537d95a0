#include "device/carried.h"

#include <vector>

#include "base/status.h"

namespace cgx::device {
namespace {

// Zeroes the bytes in [first, last) of a buffer that is sent to peers, so that it does not leak
// earlier contents of the memory.
void clear(Queue& queue, std::span<std::byte> buffer, int64_t first, int64_t last) {
  if (first < last) queue.clear(buffer.data() + first, last - first);
}

}  // namespace

CarriedSteps::CarriedSteps(const Carried& carried)
    : carried_(carried), steps_(carried.plan(), carried.layout()) {
  require(!carried.seeds(), CGX_UNSUPPORTED,
          "compressor='randk' is not supported on GPUs if the caller sends the messages, because "
          "receivers compare the ranks' seeds on the host: use another compressor, values in host "
          "memory, or the transports of cgx (carrier='native')");
}

void CarriedSteps::encode(Queue& queue, std::span<std::byte> room) const {
  const Plan& plan = carried_.plan();
  if (plan.size == 1) return;
  carried_.check_encode(room);
  const std::vector<int64_t> at = carried_.encoded_at();
  std::vector<std::byte*> to;
  for (int owner = 0; owner < plan.size; ++owner) to.push_back(room.data() + at[owner]);
  steps_.encode({0, queue}, to);
  if (!carried_.one_shot()) clear(queue, room, at[plan.rank], at[plan.rank + 1]);
  clear(queue, room, at.back(), std::ssize(room));
}

void CarriedSteps::reduce(Queue& queue, std::span<const std::byte> arrived,
                          std::span<std::byte> room) const {
  const Plan& plan = carried_.plan();
  if (plan.size > 1 || carried_.one_shot()) carried_.check_reduce(arrived, room);
  if (plan.size == 1) return;
  std::byte* const message = room.data();
  steps_.reduce({0, queue}, {arrived.data(), carried_.scatter_bytes(plan.rank)}, {&message, 1});
  clear(queue, room, carried_.gather_bytes(plan.rank), std::ssize(room));
}

void CarriedSteps::decode(Queue& queue, std::span<const std::byte> gathered) const {
  const Plan& plan = carried_.plan();
  if (plan.size == 1) return pass_through(plan, queue);
  const Received messages{gathered.data(), carried_.check_decode(gathered)};
  if (carried_.one_shot()) {
    steps_.reduce({0, queue}, messages, {});
  } else {
    steps_.decode({0, queue}, messages);
  }
}

}  // namespace cgx::device
