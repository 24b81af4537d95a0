// Small segments of a codec without fixed length share messages (algorithm/packing.h): they have
// the results and residuals of one segment with all their values, in all collectives.
#include <random>
#include <vector>

#include "algorithm/algorithm.h"
#include "cgx/verb.h"
#include "pairs_codec.h"
#include "ranks_on_hosts.h"

namespace {

using namespace cgx;

using Values = std::vector<float>;
using Segments = std::vector<cgx_segment_t>;

constexpr int64_t kNumel = 7000;  // of a block
const Segments kWhole = {{0, 2900, 512, kPairsBits, 0, nullptr}, {2900, 4100, 512, 4, 0, nullptr}};
const Segments kParts = {
    {0, 300, 512, kPairsBits, 0, nullptr},    {2900, 4100, 512, 4, 0, nullptr},
    {300, 0, 512, kPairsBits, 0, nullptr},    {300, 999, 512, kPairsBits, 0, nullptr},
    {1299, 700, 512, kPairsBits, 0, nullptr}, {1999, 901, 512, kPairsBits, 0, nullptr}};

Values values_of(int rank, int64_t numel) {
  std::mt19937 random(rank);
  std::normal_distribution<float> normal;
  Values values(numel);
  for (float& value : values) value = normal(random);
  return values;
}

struct Row {
  cgx_verb_t verb;
  cgx_algorithm_t algorithm;
};

cgx_collective_t call_of(const Row& row, const Segments& segments, const float* input,
                         float* output) {
  auto call = make<cgx_collective_t>();
  call.verb = row.verb;
  call.op = CGX_AVG;
  call.config.algorithm = row.algorithm;
  call.segments = segments.data();
  call.num_segments = static_cast<int64_t>(segments.size());
  call.input = input;
  call.output = output;
  call.occurrence = -1;
  return call;
}

// The results and the new residuals of a rank.
std::pair<Values, Values> run(const Row& row, const Segments& segments, int rank, int size,
                              int32_t comm) {
  const Verb& verb = verb_of(row.verb);
  const Values input = values_of(rank, kNumel * (verb.blocks_in ? size : 1));
  Values output(kNumel * (verb.blocks_out ? size : 1)), lost(input.size(), 0.25f);
  std::vector<void*> residuals;
  std::vector<int64_t> seeds;
  for (const cgx_segment_t& segment : segments) {
    residuals.push_back(lost.data() + segment.offset);
    seeds.push_back(segment.bits);  // equal for those that are packed
  }
  auto call = call_of(row, segments, input.data(), output.data());
  call.comm = comm;
  call.seeds = seeds.data();
  if (verb.residuals) call.residuals = residuals.data();
  ok(cgx_run(&call));
  return {output, lost};
}

void test_results(const Hosts& hosts, const Row& row) {
  const auto size = static_cast<int>(hosts.size());
  const Ranks ranks = ranks_on(hosts, "packed");
  ranks.run([&](int rank, int32_t comm) {
    CHECK(run(row, kParts, rank, size, comm) == run(row, kWhole, rank, size, comm),
          "rank %d of %d, %s, algorithm %d", rank, size, verb_of(row.verb).name, row.algorithm);
  });
}

void test_plan(int size, const Row& row) {
  float anywhere[1];
  Plan plan = make_plan(call_of(row, kParts, anywhere, anywhere), 0, size);
  resolve_algorithm(&plan);
  const size_t expected = size == 1 ? 6 : 3;
  CHECK(plan.segments.size() == expected, "%d segments", int(plan.segments.size()));
  for (const auto& blocks : {plan.sends, plan.receives})
    for (const auto& block : blocks)
      CHECK(block.size() == expected, "%d segments of a block", int(block.size()));
}

// Segments of different examples of a vmap are not packed.
void test_examples(const Row& row) {
  Segments segments = kParts;
  segments[4].example = segments[5].example = 1;
  float anywhere[1];
  Plan plan = make_plan(call_of(row, segments, anywhere, anywhere), 0, 2);
  resolve_algorithm(&plan);
  CHECK(plan.segments.size() == 4, "%d segments", int(plan.segments.size()));
}

}  // namespace

int main() {
  add_pairs_codec();
  const Row rows[] = {{CGX_ALLREDUCE, CGX_ONE_SHOT}, {CGX_ALLREDUCE, CGX_SRA},
                      {CGX_ALLREDUCE, CGX_RING},     {CGX_ALLREDUCE, CGX_AUTO},
                      {CGX_REDUCE_SCATTER, CGX_SRA}, {CGX_ALL_GATHER, CGX_SRA},
                      {CGX_ALL_TO_ALL, CGX_SRA}};
  for (const Row& row : rows) {
    test_examples(row);
    for (const int size : {1, 2, 3, 8}) {
      test_results(Hosts(size, 0), row);
      test_plan(size, row);
    }
  }
  for (const auto verb : {CGX_ALLREDUCE, CGX_REDUCE_SCATTER, CGX_ALL_GATHER})
    for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 1, 0, 1, 2}})
      test_results(hosts, {verb, CGX_HIERARCHICAL});
  std::puts("passed");
}
