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
#include "algorithm/packing.h"
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
  cgx_compressor_t compressor = CGX_UNIFORM;
  int segments = 1;  // of `numel` elements each
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
    // Messages without fixed length; several small segments are packed.
    {CGX_ALLREDUCE, CGX_ONE_SHOT, {0, 0, 0, 0}, 64, 4, CGX_ENTROPY},
    {CGX_ALLREDUCE, CGX_SRA, {0, 0, 0, 0}, 512, 4, CGX_ENTROPY},
    {CGX_ALLREDUCE, CGX_SRA, {0, 0, 0, 0}, 100, 4, CGX_ENTROPY, 2},
    {CGX_ALLREDUCE, CGX_SRA, {0, 0, 0, 0}, 512, 4, CGX_LOSSLESS},
    {CGX_ALLREDUCE, CGX_RING, {0, 0, 0, 0}, 128, 4, CGX_ENTROPY},
    {CGX_ALLREDUCE, CGX_HIERARCHICAL, {0, 0, 1, 1}, 512, 4, CGX_ENTROPY},
    {CGX_REDUCE_SCATTER, CGX_SRA, {0, 0, 0, 0}, 60, 4, CGX_ENTROPY, 2},
    {CGX_ALL_TO_ALL, CGX_SRA, {0, 0, 0, 0}, 128, 4, CGX_LOSSLESS},
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
          deliver_bulk(sink, source, slot, any_message());
          break;
        }
        case 4: {
          const auto slot = input_.number<Slot>();
          deliver_bulk(sink, source, slot, input_.pattern(input_.near(input_.number<uint8_t>())));
          break;
        }
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

  // Starts a collective with messages like these.
  void begin(int calls, std::vector<Bytes> examples) {
    calls_ = calls;
    examples_ = std::move(examples);
  }

 private:
  static void deliver_control(Sink& sink, int source, Bytes message) {
    sink.on_control(source, message);
  }
  // A valid message, a damaged one, or any bytes of about its length.
  Bytes any_message() {
    const Bytes& valid = examples_[input_.below(static_cast<int>(examples_.size()))];
    switch (input_.below(4)) {
      case 0:
        return valid;
      case 1:
        return input_.damaged(valid);
      default:
        return input_.pattern(input_.near(valid.size()));
    }
  }
  void deliver_bulk(Sink& sink, int source, Slot slot, Bytes message) {
    const uint64_t token = next_token_++;
    const Bytes& bytes = held_.emplace(token, std::move(message)).first->second;
    sink.on_bulk(Arrival(source, slot, bytes, this, token));
  }
  void release(int, uint64_t token) override { FUZZ_CHECK(held_.erase(token) == 1); }

  Input& input_;
  Bytes own_header_;
  int calls_ = 0;
  bool lost_ = false;
  std::map<std::pair<int, uint32_t>, uint32_t> sent_;  // messages so far, by source and channel
  std::vector<Bytes> examples_;                        // valid messages
  std::unordered_map<uint64_t, Bytes> held_;
  uint64_t next_token_ = 0;
};

// The buffers of a collective.
struct Memory {
  std::vector<float> input, output;
  Bytes outgoing[kSize], incoming[kSize];
  std::vector<Bytes> blobs{kSize};
};

// Returns a valid message of a chunk at a stage, of values that differ.
Bytes message_of(const Shard& shard, const Chunk& chunk, Stage stage) {
  Bytes message(static_cast<size_t>(chunk.length[stage].most));
  if (message.empty()) return message;  // the algorithm has no such stage
  for (const Piece& piece : shard.pieces_of(chunk)) {
    std::vector<float> values(static_cast<size_t>(piece.numel));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i * i % 37) - 18;
    const Piece::Coded& coded = piece.coded[stage];
    const int64_t bytes = coded.codec->encode(Dtype::kFloat32, values.data(), piece.numel,
                                              piece.first_index, {}, message.data() + coded.at);
    if (!chunk.fixed_length) message.resize(static_cast<size_t>(bytes));
  }
  return {message.begin(), message.end()};  // without spare capacity
}

// Makes an algorithm and stores examples of its messages.
std::unique_ptr<Algorithm> make(int which, Memory& memory, Agreement* agreement,
                                std::vector<Bytes>* examples) {
  if (which == kExchange) {
    examples->emplace_back();
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
    examples->emplace_back(100);
    return std::make_unique<Relay>(0, std::move(outgoing), std::move(incoming));
  }
  const Scenario& scenario = kScenarios[which];
  static const std::shared_ptr<const Topology> topologies[] = {
      std::make_shared<Topology>(std::vector<int>{0, 0, 0, 0}),
      std::make_shared<Topology>(std::vector<int>{0, 0, 1, 1})};
  const Verb& verb = verb_of(scenario.verb);
  const int64_t block = scenario.numel * scenario.segments;
  memory.input.resize(block * (verb.blocks_in ? kSize : 1));
  memory.output.resize(block * (verb.blocks_out ? kSize : 1));
  std::vector<cgx_segment_t> segments;
  for (int i = 0; i < scenario.segments; ++i)
    segments.push_back({i * scenario.numel, scenario.numel, 16, scenario.bits, 0, nullptr});
  auto call = cgx::make<cgx_collective_t>();
  call.verb = scenario.verb;
  call.config.algorithm = scenario.verb == CGX_ALLREDUCE ? scenario.algorithm : CGX_AUTO;
  call.config.compressor = scenario.compressor;
  call.op = CGX_SUM;
  call.segments = segments.data();
  call.num_segments = scenario.segments;
  call.input = memory.input.data();
  call.output = memory.output.data();
  Plan plan = make_plan(call, 0, kSize);
  plan.topology = topologies[scenario.hosts[kSize - 1]];
  plan.algorithm = scenario.algorithm;
  plan.chunk_bytes = kMessageBytes;
  Packing::pack(&plan);
  *agreement = make_agreement(call, plan);
  const Layout layout(plan);
  for (int owner = 0; owner < kSize; ++owner)
    for (const Chunk& chunk : layout.shard(owner).chunks)
      for (const Stage stage : {Stage::kScatter, Stage::kGather, Stage::kIntra})
        examples->push_back(message_of(layout.shard(owner), chunk, stage));
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
    std::vector<Bytes> examples;
    collective->algorithm = make(which, memory, &collective->agreement, &examples);
    script.begin(call, std::move(examples));
    collective->timeout = std::chrono::hours(1);
    collective->members = {0, 1, 2, 3};
    engine.run(collective);
    FUZZ_CHECK(collective->done);
    FUZZ_CHECK(collective->status == CGX_OK || !collective->error.empty());
  }
  engine.close(std::chrono::seconds(0));
  return 0;
}
