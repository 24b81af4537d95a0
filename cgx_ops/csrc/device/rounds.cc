#include "device/rounds.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/status.h"

namespace cgx::device {

Rounds::Rounds(Plan plan) : plan_(std::move(plan)), layout_(plan_), steps_(plan_, layout_) {
  for (const Segment& segment : plan_.segments)
    for (const CodecSettings& codec : segment.codecs.each)
      require(codec.compressor != CGX_RANDK || !segment.seed_at, CGX_UNSUPPORTED,
              "randk does not support seeds in GPU memory, because ranks cannot compare them: pass "
              "seeds in host memory");
  for (int owner = 0; owner < plan_.size; ++owner) {
    const auto& chunks = layout_.shard(owner).chunks;
    count_ = std::max(count_, static_cast<int64_t>(chunks.size()));
    for (const Chunk& chunk : chunks) {
      const int64_t bytes =
          std::max(chunk.length[Stage::kScatter].most, chunk.length[Stage::kGather].most);
      require(bytes <= plan_.chunk_bytes, CGX_UNSUPPORTED, "a bucket takes ", bytes,
              " bytes, but GPUs send at most ", plan_.chunk_bytes,
              " at a time: use a smaller bucket_size");
    }
  }
}

void Rounds::run(int64_t number, Wire& wire, Lane& lane) const {
  const bool scatters = plan_.verb->scatters, gathers = plan_.verb->gathers;
  const Round round{number, lane.queue(), wire.regions(), lane.fault()};
  const auto received = [&](Traffic traffic) {
    const Slots slots = lane.slots(traffic);
    return Received{slots.from, slots.stride};
  };
  const Traffic first = scatters && !one_shot() ? Traffic::kEach : Traffic::kAll;
  steps_.encode(round, lane.slots(first).to);
  exchange(number, lane, first);
  const bool again = scatters && gathers && !one_shot();  // the sums are exchanged, too
  if (scatters) {
    std::vector<std::byte*> to;
    if (again) to = lane.slots(Traffic::kAll).to;
    steps_.reduce(round, received(first), to);
  }
  if (again) exchange(number, lane, Traffic::kAll);
  if (gathers && !one_shot()) steps_.decode(round, received(Traffic::kAll));
}

void Rounds::exchange(int64_t round, Lane& lane, Traffic traffic) const {
  const auto bytes = [&](int owner, Stage stage) {
    const Chunk* chunk = Steps::chunk(layout_.shard(owner), round);
    return chunk ? chunk->length[stage].most : 0;
  };
  std::vector<int64_t> sent(plan_.size, 0), received(plan_.size, 0);
  const Stage stage = traffic == Traffic::kEach || one_shot() ? Stage::kScatter : Stage::kGather;
  for (int peer = 0; peer < plan_.size; ++peer) {
    if (peer == plan_.rank) continue;
    sent[peer] = bytes(traffic == Traffic::kEach ? peer : plan_.rank, stage);
    received[peer] = bytes(traffic == Traffic::kEach ? plan_.rank : peer, stage);
  }
  lane.exchange(traffic, sent, received);
}

}  // namespace cgx::device
