// The algorithms, and which one `auto` takes. A new one is a file beside this, which tells its row.
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
  constexpr int64_t kLinkBytes = 32 * 1024;
  int64_t pairs = 0;
  for (int host = 0; host < topology.hosts(); ++host) {
    const auto ranks = static_cast<int64_t>(topology.ranks_of(host).size());
    pairs = std::max(pairs, ranks * (topology.size() - ranks));
  }
  return std::clamp(kLinkBytes / pairs, kHeaderBytes, kEagerBytes);
}

// The first codec of the plan that cannot be cut; null if all can.
const CodecEntry* unsliced(const Plan& plan) {
  for (const Segment& segment : plan.segments)
    for (const CodecSettings& settings : segment.codecs.each)
      if (const CodecEntry& entry = codec_entry(settings); !entry.sliced) return &entry;
  return nullptr;
}

// cut: whether all codecs of the plan can be.
cgx_algorithm_t pick_algorithm(const Plan& plan, bool cut) {
  const bool nested = plan.topology && plan.topology->nested();
  const cgx_algorithm_t of_long = nested ? CGX_HIERARCHICAL : CGX_SRA;
  if (plan.algorithm == CGX_HIERARCHICAL) return of_long;
  if (plan.algorithm != CGX_AUTO && plan.algorithm != CGX_BY_HOSTS) return plan.algorithm;
  if (!cut) return CGX_ONE_SHOT;
  if (plan.algorithm == CGX_BY_HOSTS) return of_long;
  // Up to and including `bytes` of encoded values. A quantized ring is never picked: its error
  // grows with the number of ranks.
  struct Row {
    int64_t bytes;
    cgx_algorithm_t algorithm;
  };
  const Row rows[] = {{nested ? nested_one_shot_bytes(*plan.topology) : kEagerBytes, CGX_ONE_SHOT},
                      {INT64_MAX, of_long}};
  const Row* row = rows;
  int64_t bytes = 0;
  for (const auto& segment : plan.segments) {
    if (row->bytes == INT64_MAX) break;  // long lists need not be sized to their end
    if (segment.repeats) continue;
    bytes += make_codec(segment.codecs[Way::kScatter])->max_bytes(segment.numel);
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

std::unique_ptr<Algorithm> make_algorithm(Plan plan) {
  return entry_of(plan.algorithm).make(std::move(plan));
}

int64_t payload_bytes(const Plan& plan) {
  return plan.size == 1 ? 0 : entry_of(plan.algorithm).bytes(plan, Layout(plan));
}

void resolve_algorithm(Plan* plan) {
  const CodecEntry* whole = unsliced(*plan);
  plan->algorithm = pick_algorithm(*plan, /*cut=*/!whole);
  const AlgorithmEntry& entry = entry_of(plan->algorithm);
  require(!whole || !entry.sliced, CGX_UNSUPPORTED, entry.name,
          " cuts values into shards, and what ", whole ? whole->name : "",
          " encodes cannot be cut: use an allreduce by one_shot or auto");
  // The smallest or largest of values is one of them.
  const bool selects = plan->op == Op::kMin || plan->op == Op::kMax;
  if (selects || !entry.passes_sums_on) return;
  for (Segment& segment : plan->segments) {
    CodecSettings& sums = segment.codecs[Way::kScatter];
    sums.dtype = Dtype::kFloat32;
    if (votes(segment.codecs[Way::kGather])) sums.bits = kExactBits;  // counts
  }
}

}  // namespace cgx
