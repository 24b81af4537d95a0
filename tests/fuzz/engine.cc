// The engine of rank 0. Its peers send valid headers and values, corrupted ones, and any bytes,
// while a collective of each algorithm is in flight. The collective must complete or raise an
// Error. Each message is in memory of exactly its length.
#include "engine/engine.h"

#include <array>
#include <map>
#include <optional>
#include <unordered_map>

#include "algorithm/algorithm.h"
#include "algorithm/exchange.h"
#include "algorithm/layout.h"
#include "algorithm/relay.h"
#include "base/status.h"
#include "input.h"

using namespace cgx;

namespace {

constexpr int kSize = 4;
constexpr int kCalls = 2;              // consecutive calls
constexpr int64_t kMessageBytes = 80;  // small, so that few values need several messages

struct Scenario {
  cgx_verb_t verb;
  cgx_algorithm_t algorithm;
  std::array<int, kSize> hosts;
  int64_t numel;
  int bits;
};
// The last two algorithms are not part of a plan.
constexpr Scenario kScenarios[] = {
    {CGX_ALLREDUCE, CGX_ONE_SHOT, {0, 0, 0, 0}, 64, 4},
    {CGX_ALLREDUCE, CGX_ONE_SHOT, {0, 0, 0, 0}, 500, 8},
    {CGX_ALLREDUCE, CGX_SRA, {0, 0, 0, 0}, 512, 4},
    {CGX_ALLREDUCE, CGX_SRA, {0, 0, 0, 0}, 128, 32},
    {CGX_ALLREDUCE, CGX_RING, {0, 0, 0, 0}, 128, 32},
    {CGX_ALLREDUCE, CGX_HIERARCHICAL, {0, 0, 1, 1}, 512, 4},
    {CGX_REDUCE_SCATTER, CGX_SRA, {0, 0, 0, 0}, 128, 4},
    {CGX_ALL_GATHER, CGX_SRA, {0, 0, 0, 0}, 128, 4},
    {CGX_REDUCE_SCATTER, CGX_HIERARCHICAL, {0, 0, 1, 1}, 128, 4},
    {CGX_ALL_GATHER, CGX_HIERARCHICAL, {0, 0, 1, 1}, 128, 4},
    {CGX_ALL_TO_ALL, CGX_SRA, {0, 0, 0, 0}, 128, 4},
    {},  // exchange
    {},  // relay
};
constexpr int kExchange = std::size(kScenarios) - 2, kRelay = kExchange + 1;

// Delivers the messages that the input describes, then the loss of all peers. So no collective
// waits for a deadline.
class ScriptedTransport : public Transport, private Arrival::Release {
 public:
  explicit ScriptedTransport(Input& input) : input_(input) {}
  const char* name() const override { return "thread"; }
  BufferRef allocate(size_t bytes) override {
    struct Block : Buffer {
      Bytes memory;
    };
    auto block = std::make_shared<Block>();
    block->memory.resize(bytes);
    block->data = block->memory.data();
    block->capacity = bytes;
    return block;
  }
  void send_control(int, std::span<const std::byte> message) override {
    if (std::holds_alternative<Header>(read_message(0, message))) own_header_ = to_bytes(message);
  }
  void send(int, Slot, const BufferRef&, size_t, const std::shared_ptr<SendState>&) override {}
  bool progress(Sink& sink) override {
    while (!input_.empty() && !own_header_.empty()) {
      const int source = 1 + input_.below(kSize - 1);
      switch (input_.below(6)) {
        case 0:  // valid, if peers make the same call
          sink.on_control(source, own_header_);
          break;
        case 1:
          deliver_control(sink, source, input_.corrupted(own_header_));
          break;
        case 2:
          deliver_control(sink, source, input_.bytes(input_.below(200)));
          break;
        case 3: {  // on the expected channel
          const auto channel = static_cast<uint32_t>(2 * calls_ + input_.below(2));
          const Slot slot{channel, sent_[{source, channel}]++};
          deliver_bulk(sink, source, slot, lengths_[input_.below(lengths_.size())]);
          break;
        }
        case 4:
          deliver_bulk(sink, source, input_.number<Slot>(), input_.number<uint8_t>());
          break;
        case 5:  // the engine processes the messages so far
          return true;
      }
    }
    if (own_header_.empty() || lost_) return false;
    lost_ = true;
    for (int peer = 1; peer < kSize; ++peer) sink.on_peer_lost(peer, Loss::kDied, "it has ended");
    return true;
  }
  void wait(std::chrono::microseconds) override {}
  void wake() override {}
  bool flushed() const override { return true; }
  bool drained() const override { return true; }
  void leave(bool, const std::string&) override {}

  // Starts a collective with messages of these lengths.
  void begin(int calls, std::vector<size_t> lengths) {
    calls_ = calls;
    lengths_ = std::move(lengths);
  }

 private:
  static void deliver_control(Sink& sink, int source, Bytes message) {
    sink.on_control(source, message);
  }
  void deliver_bulk(Sink& sink, int source, Slot slot, size_t length) {
    const uint64_t token = next_token_++;
    const Bytes& bytes = held_.emplace(token, input_.pattern(input_.near(length))).first->second;
    sink.on_bulk(Arrival(source, slot, bytes, this, token));
  }
  void release(int, uint64_t token) override { FUZZ_CHECK(held_.erase(token) == 1); }

  Input& input_;
  Bytes own_header_;
  int calls_ = 0;
  bool lost_ = false;
  std::map<std::pair<int, uint32_t>, uint32_t> sent_;  // messages so far, by source and channel
  std::vector<size_t> lengths_;                        // lengths of valid messages
  std::unordered_map<uint64_t, Bytes> held_;
  uint64_t next_token_ = 0;
};

// The buffers of a collective.
struct Memory {
  std::vector<float> input, output;
  Bytes outgoing[kSize], incoming[kSize];
  std::vector<Bytes> blobs{kSize};
};

// Makes an algorithm and stores the lengths of its messages.
std::unique_ptr<Algorithm> make(int which, Memory& memory, Agreement* agreement,
                                std::vector<size_t>* lengths) {
  if (which == kExchange) {
    lengths->push_back(0);
    return std::make_unique<Exchange>(0, Bytes(20), &memory.blobs);
  }
  if (which == kRelay) {
    std::vector<std::span<const std::byte>> outgoing;
    std::vector<std::span<std::byte>> incoming;
    for (int peer = 0; peer < kSize; ++peer) {
      memory.outgoing[peer].resize(100);
      memory.incoming[peer].resize(100);
      outgoing.emplace_back(memory.outgoing[peer]);
      incoming.emplace_back(memory.incoming[peer]);
    }
    lengths->push_back(100);
    return std::make_unique<Relay>(0, std::move(outgoing), std::move(incoming));
  }
  const Scenario& scenario = kScenarios[which];
  static const std::shared_ptr<const Topology> topologies[] = {
      std::make_shared<Topology>(std::vector<int>{0, 0, 0, 0}),
      std::make_shared<Topology>(std::vector<int>{0, 0, 1, 1})};
  const Verb& verb = verb_of(scenario.verb);
  memory.input.resize(scenario.numel * (verb.blocks_in ? kSize : 1));
  memory.output.resize(scenario.numel * (verb.blocks_out ? kSize : 1));
  const cgx_segment_t segment{0, scenario.numel, 16, scenario.bits, 0, nullptr};
  auto call = cgx::make<cgx_collective_t>();
  call.verb = scenario.verb;
  call.config.algorithm = scenario.verb == CGX_ALLREDUCE ? scenario.algorithm : CGX_AUTO;
  call.op = CGX_SUM;
  call.segments = &segment;
  call.num_segments = 1;
  call.input = memory.input.data();
  call.output = memory.output.data();
  Plan plan = make_plan(call, 0, kSize);
  plan.topology = topologies[scenario.hosts[kSize - 1]];
  plan.algorithm = scenario.algorithm;
  plan.chunk_bytes = kMessageBytes;
  *agreement = make_agreement(call, plan);
  const Layout layout(plan);
  for (int owner = 0; owner < kSize; ++owner)
    for (const Chunk& chunk : layout.shard(owner).chunks)
      for (const Length& length : chunk.length.each) lengths->push_back(length.most);
  std::sort(lengths->begin(), lengths->end());
  lengths->erase(std::unique(lengths->begin(), lengths->end()), lengths->end());
  return make_algorithm(std::move(plan));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const bool one_thread = setenv("CGX_THREADS", "1", 1) == 0;
  FUZZ_CHECK(one_thread);
  Input input(data, size);
  const int which = input.below(std::size(kScenarios));
  Memory memory;
  auto transport = std::make_unique<ScriptedTransport>(input);
  ScriptedTransport& script = *transport;
  Engine engine("fuzzed", 0, kSize, std::move(transport));
  for (int call = 0; call < kCalls && !engine.closed(); ++call) {
    auto collective = std::make_shared<Collective>();
    std::vector<size_t> lengths;
    collective->algorithm = make(which, memory, &collective->agreement, &lengths);
    script.begin(call, std::move(lengths));
    collective->timeout = std::chrono::hours(1);
    collective->members = {0, 1, 2, 3};
    engine.run(collective);
    FUZZ_CHECK(collective->done);
    FUZZ_CHECK(collective->status == CGX_OK || !collective->error.empty());
  }
  engine.close(std::chrono::seconds(0));
  return 0;
}
