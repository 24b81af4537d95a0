// The table of algorithms, and the choice of `auto`. A new algorithm is a file in this folder that
// defines its row.
#include <algorithm>
#include <cstdint>

#include "algorithm/algorithm.h"
#include "algorithm/one_shot.h"
#include "algorithm/packing.h"
#include "base/status.h"

namespace cgx {
namespace {

// The largest size for which `auto` sends directly if hosts have several ranks (one_shot; sra for
// blocks). Then all g ranks of a host send to the n - g ranks of other hosts, over one link. With
// hierarchical, a host sends a value at most twice, but in more steps. A 1 Gbit/s link transfers 32
// KiB in the time of these steps. Values that are no longer than the headers, which go to all ranks
// anyway, always use one_shot.
int64_t nested_one_shot_bytes(const Topology& topology) {
  constexpr int64_t kLinkBytes = 32 * 1024;
  int64_t pairs = 0;
  for (int host = 0; host < topology.hosts(); ++host) {
    const auto ranks = static_cast<int64_t>(topology.ranks_of(host).size());
    pairs = std::max(pairs, ranks * (topology.size() - ranks));
  }
  return std::clamp(kLinkBytes / pairs, kHeaderBytes, kEagerBytes);
}

cgx_algorithm_t pick_algorithm(const Plan& plan) {
  const bool nested = plan.topology && plan.topology->nested();
  const cgx_algorithm_t of_long = nested ? CGX_HIERARCHICAL : CGX_SRA;
  const Algorithms served = plan.verb->algorithms;
  if (served == Algorithms::kOne) return CGX_SRA;
  if (plan.algorithm == CGX_HIERARCHICAL || plan.algorithm == CGX_BY_HOSTS) return of_long;
  const bool all = served == Algorithms::kAll;
  if (plan.algorithm != CGX_AUTO) return all ? plan.algorithm : CGX_SRA;
  // Up to `bytes` encoded bytes, inclusive. A quantized ring is never chosen: its error grows with
  // the number of ranks.
  struct Row {
    int64_t bytes;
    cgx_algorithm_t algorithm;
  };
  const Row rows[] = {
      {nested ? nested_one_shot_bytes(*plan.topology) : kEagerBytes, all ? CGX_ONE_SHOT : CGX_SRA},
      {INT64_MAX, of_long}};
  const Stage stage = plan.verb->scatters ? Stage::kScatter : Stage::kGather;
  const Row* row = rows;
  int64_t bytes = 0;
  for (const auto& segment : plan.segments) {
    if (row->bytes == INT64_MAX) break;  // stop early for long lists
    if (segment.example > 0) continue;
    bytes += make_codec(segment.codecs[stage])->max_bytes(segment.numel);
    while (bytes > row->bytes) ++row;
  }
  return row->algorithm;
}

}  // namespace

const std::vector<AlgorithmEntry>& algorithm_table() {
  static const std::vector<AlgorithmEntry> table = {kOneShot, kSra, kRing, kHierarchical};
  return table;
}

const AlgorithmEntry& entry_of(cgx_algorithm_t algorithm) {
  for (const auto& entry : algorithm_table())
    if (entry.id == algorithm) return entry;
  fail(CGX_INTERNAL, "no algorithm ", static_cast<int>(algorithm));
}

const AlgorithmEntry& entry_of(const Plan& plan) {
  struct Row {
    cgx_verb_t verb;
    cgx_algorithm_t algorithm;
    const AlgorithmEntry& entry;
  };
  static const Row rows[] = {{CGX_ALL_TO_ALL, CGX_SRA, kAllToAll},
                             {CGX_REDUCE_SCATTER, CGX_HIERARCHICAL, kHierarchicalScatter},
                             {CGX_ALL_GATHER, CGX_HIERARCHICAL, kHierarchicalGather}};
  for (const Row& row : rows)
    if (row.verb == plan.verb->id && row.algorithm == plan.algorithm) return row.entry;
  return entry_of(plan.algorithm);
}

std::unique_ptr<Algorithm> make_algorithm(Plan plan) {
  const AlgorithmEntry& entry = entry_of(plan);
  if (!plan.packing) return entry.make(std::move(plan));
  return make_packed(plan, entry.make(plan));
}

int64_t payload_bytes(const Plan& plan) {
  return plan.size == 1 ? 0 : entry_of(plan).bytes(plan, Layout(plan));
}

void resolve_algorithm(Plan* plan) {
  plan->algorithm = pick_algorithm(*plan);
  // A minimum or maximum is one of the values.
  const bool selects = plan->op == Op::kMin || plan->op == Op::kMax;
  if (!selects && entry_of(*plan).passes_sums_on) {
    for (Segment& segment : plan->segments) {
      CodecSettings& sums = segment.codecs[Stage::kScatter];
      sums.dtype = Dtype::kFloat32;
      if (votes(segment.codecs[Stage::kGather])) sums.bits = kExactBits;  // vote counts
    }
  }
  Packing::pack(plan);
}

}  // namespace cgx
