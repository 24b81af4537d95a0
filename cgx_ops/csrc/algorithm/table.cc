// The algorithms, and which one `auto` takes. A new one is a file beside this and a row here.
#include <algorithm>
#include <cstdint>

#include "algorithm/algorithm.h"
#include "algorithm/one_shot.h"
#include "base/status.h"

namespace cgx {
namespace {

// Up to which `auto` takes one_shot where hosts have several ranks. All g ranks of a host send to
// the n - g of other hosts, on one link; by hierarchical the host sends a value twice at most, but
// in four steps. A link of 1 Gbit/s carries 32 KiB in the time of these; and values that are no
// longer than the headers, which go to all ranks anyway, may always ride in them.
int64_t nested_one_shot_bytes(const Topology& topology) {
  constexpr int64_t kLinkBytes = 32 * 1024, kHeaderBytes = 128;
  int64_t pairs = 0;
  for (int host = 0; host < topology.hosts(); ++host) {
    const auto ranks = static_cast<int64_t>(topology.ranks_of(host).size());
    pairs = std::max(pairs, ranks * (topology.size() - ranks));
  }
  return std::clamp(kLinkBytes / pairs, kHeaderBytes, kEagerBytes);
}

cgx_algorithm_t pick_algorithm(const Plan& plan) {
  const bool nested = plan.topology && plan.topology->nested();
  if (plan.algorithm == CGX_HIERARCHICAL && !nested) return CGX_SRA;
  if (plan.algorithm != CGX_AUTO) return plan.algorithm;
  // Up to and including `bytes` of encoded values. A quantized ring is never picked: its error
  // grows with the number of ranks.
  struct Row {
    int64_t bytes;
    cgx_algorithm_t algorithm;
  };
  const Row rows[] = {{nested ? nested_one_shot_bytes(*plan.topology) : kEagerBytes, CGX_ONE_SHOT},
                      {INT64_MAX, nested ? CGX_HIERARCHICAL : CGX_SRA}};
  const Row* row = rows;
  int64_t bytes = 0;
  for (const auto& segment : plan.segments) {
    if (row->bytes == INT64_MAX) break;  // long lists need not be sized to their end
    bytes += make_compressor(segment.scatter)->max_bytes(segment.numel);
    while (bytes > row->bytes) ++row;
  }
  return row->algorithm;
}

const AlgorithmEntry& entry_of(cgx_algorithm_t algorithm) {
  for (const auto& entry : algorithm_table())
    if (entry.id == algorithm) return entry;
  fail(CGX_INTERNAL, "no algorithm ", static_cast<int>(algorithm));
}

}  // namespace

const std::vector<AlgorithmEntry>& algorithm_table() {
  static const std::vector<AlgorithmEntry> table = {
      {CGX_ONE_SHOT, "one_shot",
       "everyone sends everything to everyone: 1 step, (n-1) x size sent, quantized once",
       /*passes_sums_on=*/false, make_one_shot},
      {CGX_SRA, "sra", "scatter-reduce-allgather: 2 steps, 2(n-1)/n x size sent, quantized twice",
       /*passes_sums_on=*/false, make_sra},
      {CGX_RING, "ring",
       "2(n-1) steps to the right-hand neighbour, 2(n-1)/n x size sent, quantized n times: for "
       "exact values",
       /*passes_sums_on=*/true, make_ring},
      {CGX_HIERARCHICAL, "hierarchical",
       "ranks of a host, hosts, ranks of a host: 4 steps, 2(h-1)/h x size sent by each of h hosts "
       "to others, quantized twice",
       /*passes_sums_on=*/true, make_hierarchical},
  };
  return table;
}

std::unique_ptr<Algorithm> make_algorithm(Plan plan) {
  return entry_of(plan.algorithm).make(std::move(plan));
}

void resolve_algorithm(Plan* plan) {
  plan->algorithm = pick_algorithm(*plan);
  // The smallest or largest of values is one of them.
  const bool selects = plan->op == Op::kMin || plan->op == Op::kMax;
  if (selects || !entry_of(plan->algorithm).passes_sums_on) return;
  for (Segment& segment : plan->segments) segment.scatter.dtype = Dtype::kFloat32;
}

}  // namespace cgx
