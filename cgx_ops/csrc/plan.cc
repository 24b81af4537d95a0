#include "plan.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <span>
#include <type_traits>

#include "base/checks.h"
#include "base/hash.h"
#include "base/seeds.h"
#include "base/status.h"
#include "config.h"
#include "config_codec.h"

namespace cgx {
namespace {

// The config of a segment: its own or the call's, with the segment's bits and bucket_size.
cgx_config_t segment_config(const cgx_collective_t& call, const cgx_segment_t& segment) {
  cgx_config_t config = segment.config ? *segment.config : call.config;
  config.bits = segment.bits;
  config.bucket_size = segment.bucket_size;
  return config;
}

// The call's config with valid bits and bucket_size, to check only its other fields.
cgx_config_t call_config(const cgx_collective_t& call) {
  cgx_config_t config = call.config;
  config.bits = kExactBits;
  config.bucket_size = 1;
  return config;
}

bool same(const cgx_config_t& a, const cgx_config_t& b) {
  static_assert(std::has_unique_object_representations_v<cgx_config_t>);
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

// Segments in one buffer must not overlap. Lists of pointers are not checked for overlaps. `most`:
// the limit on elements, of all segments together and of a block.
void check_segments(const cgx_collective_t& call, int64_t most) {
  in_range("num_segments", call.num_segments, 0, kMostElements, kCountsAccepted);
  check_pointer(call.segments, call.num_segments, "segments", "segments");
  // Otherwise the check of the first segment covers the call's config.
  if (call.num_segments == 0 || call.segments[0].config) check_config(call_config(call));
  in_range("block_numel", call.block_numel, 0, most, "0 or more, in all blocks at most 2^59");
  const bool in_one_buffer = !call.inputs && !call.outputs;
  const int64_t block_numel = in_one_buffer ? call.block_numel : 0;
  int64_t total = 0;
  std::optional<cgx_config_t> checked;  // most segments have the same config, so keep the last
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (int64_t i = 0; i < call.num_segments; ++i) {
    const auto& segment = call.segments[i];
    require(segment.offset >= 0 && segment.numel >= 0, CGX_INVALID_ARGUMENT, "segment ", i,
            " has offset ", segment.offset, " and numel ", segment.numel,
            "; both must be at least 0");
    require(segment.example >= 0, CGX_INVALID_ARGUMENT, "segment ", i, " has example ",
            segment.example, "; it must be at least 0");
    require(segment.offset <= most &&
                segment.numel <= most - (in_one_buffer ? segment.offset : 0) &&
                segment.numel <= most - total,
            CGX_INVALID_ARGUMENT, "segment ", i, " has offset ", segment.offset, " and numel ",
            segment.numel, "; all ranks together may have at most 2^59 elements");
    total += segment.numel;
    const cgx_config_t config = segment_config(call, segment);
    if (!checked || !same(config, *checked)) check_config(config);
    checked = config;
    require(block_numel == 0 || segment.offset + segment.numel <= block_numel, CGX_INVALID_ARGUMENT,
            "segment ", i, " ends at element ", segment.offset + segment.numel,
            ", beyond the block of ", block_numel);
    if (segment.numel > 0 && in_one_buffer && call.num_segments > 1)
      ranges.emplace_back(segment.offset, segment.offset + segment.numel);
  }
  if (!std::is_sorted(ranges.begin(), ranges.end())) std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i)
    require(ranges[i].first >= ranges[i - 1].second, CGX_INVALID_ARGUMENT,
            "segments overlap at element ", ranges[i].first);
}

// The config that ranks compare. CGX_CODECS_OWN is replaced by the compressor's rounding.
AgreedConfig agreed_config(cgx_config_t config, int64_t algorithm = CGX_AUTO) {
  config.rounding = static_cast<int64_t>(rounding_of(config));
  config.algorithm = algorithm;
  AgreedConfig agreed;
  std::memcpy(agreed.data(), &config, sizeof(agreed));
  return agreed;
}

// Hashes the segments. The agreement contains only the first segment's config.
uint64_t hash_segments(const cgx_collective_t& call) {
  uint64_t hash = fnv1a({});
  if (call.num_segments == 0) return hash;
  cgx_config_t first = segment_config(call, call.segments[0]);
  for (int64_t i = 0; i < call.num_segments; ++i) {  // offsets may differ between ranks
    const cgx_segment_t& segment = call.segments[i];
    const int64_t fields[] = {segment.numel, segment.bucket_size, segment.bits};
    hash = fnv1a(std::as_bytes(std::span(fields)), hash);
    first.bits = segment.bits;
    first.bucket_size = segment.bucket_size;
    const AgreedConfig own = agreed_config(segment_config(call, segment));
    if (own != agreed_config(first)) hash = fnv1a(std::as_bytes(std::span(own)), hash);
  }
  return hash;
}

// Names a number of a peer, which may be out of range.
template <size_t N>
const char* name_of(const char* const (&names)[N], int number) {
  return number >= 0 && number < static_cast<int>(N) ? names[number] : "unknown";
}

const char* verb_name(int verb) {
  return verb >= 0 && verb < std::ssize(kVerbs) ? kVerbs[verb].name : "unknown";
}
const char* dtype_name(int dtype) {
  static constexpr const char* kNames[] = {"float32", "float16", "bfloat16"};
  return name_of(kNames, dtype);
}
const char* op_name(int op) {
  static constexpr const char* kNames[] = {"sum", "avg", "min", "max", "product"};
  return name_of(kNames, op);
}

// Lists of pointers must be complete and supported by the verb.
void check_lists(const cgx_collective_t& call, const Plan& plan, BuffersUsed used) {
  struct Row {
    const char* name;
    const void* const* pointers;
    bool used;
  };
  const Row rows[] = {{"inputs", call.inputs, used.input}, {"outputs", call.outputs, used.output}};
  for (const Row& row : rows) {
    if (!row.pointers) continue;
    require(plan.verb->lists, CGX_INVALID_ARGUMENT, row.name, " are given for ", plan.verb->name,
            ", whose segments are in one buffer: use input and output");
    for (int64_t i = 0; i < call.num_segments && row.used; ++i)
      require(row.pointers[i] || call.segments[i].numel == 0, CGX_INVALID_ARGUMENT, row.name, "[",
              i, "] is a null pointer; it holds ", call.segments[i].numel, " elements");
  }
  if (!call.residuals) return;
  require(plan.verb->residuals, CGX_INVALID_ARGUMENT, "residuals are given for ", plan.verb->name,
          ", which does not support them: leave them out");
  require(plan.op == Op::kSum || plan.op == Op::kAvg, CGX_INVALID_ARGUMENT,
          "residuals are given for op ", op_name(call.op), ": only sum and avg support them");
}

// Sizes of blocks must be complete and supported by the verb. A peer needs them.
void check_splits(const cgx_collective_t& call, const Verb& verb, int size) {
  require(!call.peer || (call.input_splits && call.output_splits), CGX_INVALID_ARGUMENT,
          "a peer is given without input_splits and output_splits: pass both");
  if (!call.input_splits && !call.output_splits) return;
  require(verb.exchanges(), CGX_INVALID_ARGUMENT, "input_splits or output_splits are given for ",
          verb.name, ", whose blocks have equal sizes: leave them out");
  require(call.input_splits && call.output_splits, CGX_INVALID_ARGUMENT,
          call.input_splits ? "input_splits" : "output_splits",
          " are given alone: pass both input_splits and output_splits, or neither");
  require(call.num_segments == 1 && call.segments[0].offset == 0 && call.segments[0].numel == 0,
          CGX_INVALID_ARGUMENT, "input_splits and output_splits are given with ", call.num_segments,
          " segments",
          call.num_segments == 0 ? ""
                                 : join(", the first with offset ", call.segments[0].offset,
                                        " and numel ", call.segments[0].numel),
          ": pass one segment with offset 0 and numel 0");
  for (const auto& [name, splits] : {std::pair("input_splits", call.input_splits),
                                     std::pair("output_splits", call.output_splits)}) {
    int64_t total = 0;
    for (int rank = 0; rank < size; ++rank) {
      require(splits[rank] >= 0 && splits[rank] <= kMostElements - total, CGX_INVALID_ARGUMENT,
              name, "[", rank, "] is ", splits[rank], "; accepted: 0 or more, in all at most 2^59");
      const int peer = call.peer ? *call.peer : rank;
      require(rank == peer || splits[rank] == 0, CGX_INVALID_ARGUMENT, name, "[", rank, "] is ",
              splits[rank], ", but the peer is rank ", peer, ": it must be 0");
      require(call.block_numel == 0 || splits[rank] % call.block_numel == 0, CGX_INVALID_ARGUMENT,
              name, "[", rank, "] is ", splits[rank], ", which is not a multiple of a row of ",
              call.block_numel, " elements, as block_numel says");
      total += splits[rank];
    }
  }
  require(size > 1 || call.input_splits[0] == call.output_splits[0], CGX_INVALID_ARGUMENT,
          "input_splits[0] is ", call.input_splits[0], " and output_splits[0] is ",
          call.output_splits[0], "; with one rank both must be equal");
}

// Sets the codecs of a segment of `numel` elements.
void set_codecs(const cgx_config_t& config, Dtype dtype, int64_t numel, Segment* segment) {
  // A bucket larger than the segment is reduced to one with the same bytes, whose size cannot
  // overflow.
  CodecSettings codec = settings_of(config, dtype);
  const int64_t most = config.skip_incomplete_buckets ? numel + 1 : std::max<int64_t>(1, numel);
  codec.bucket_size = std::min(codec.bucket_size, most);
  // Votes are compressed at any size.
  if (config.compressor != CGX_SIGN &&
      numel < std::max<int64_t>(CGX_SMALLEST_COMPRESSED, config.minimal_size))
    codec.bits = kExactBits;
  if (config.compressor == CGX_RANDK) codec.seed = segment->seed;
  segment->codecs = settings_per_stage(config, codec);
}

// Returns the plan's segment in the size of each rank's block, one block after the other.
std::vector<std::vector<Segment>> split_blocks(const cgx_collective_t& call, const Plan& plan,
                                               const int64_t* splits) {
  std::vector<std::vector<Segment>> blocks(plan.size, plan.segments);
  int64_t offset = 0;
  for (int rank = 0; rank < plan.size; ++rank) {
    Segment& segment = blocks[rank][0];
    segment.input_at += plan.bytes(offset);
    segment.output_at += plan.bytes(offset);
    segment.numel = splits[rank];
    set_codecs(segment_config(call, call.segments[0]), plan.dtype, segment.numel, &segment);
    offset += splits[rank];
  }
  return blocks;
}

// Elements of an input or output. `blocks`: whether it has a block per rank.
int64_t buffer_numel(const Plan& plan, int64_t block_numel, bool blocks, const int64_t* splits) {
  return splits ? std::accumulate(splits, splits + plan.size, int64_t{0})
                : block_numel * (blocks ? plan.size : 1);
}

// The base of all offsets.
const void* first_of(const void* const* pointers, int64_t count) {
  const auto found = std::find_if(pointers, pointers + count, [](const void* p) { return p; });
  return found == pointers + count ? nullptr : *found;
}
void* first_of(void* const* pointers, int64_t count) {
  return const_cast<void*>(first_of(const_cast<const void* const*>(pointers), count));
}

// Whether two launches belong to one program and differ. Runtimes number each program's launches
// from an arbitrary 32-bit number. Launches of two programs are close by chance in one of 32,768
// cases, and are then rejected wrongly.
bool of_other_launches(const Agreement& left, const Agreement& right) {
  constexpr uint32_t kNear = 1 << 16;
  const auto ahead = static_cast<uint32_t>(right.launch) - static_cast<uint32_t>(left.launch);
  return left.launch != 0 && right.launch != 0 && ahead != 0 && (ahead < kNear || -ahead < kNear);
}

}  // namespace

std::vector<int> members_of(const cgx_collective_t& call, int rank, int size) {
  if (call.peer) {
    const int peer = *call.peer;
    require(peer >= 0 && peer < size && peer != rank, CGX_INVALID_ARGUMENT, "peer is ", peer,
            "; accepted: a rank from 0 to ", size - 1, " other than this one, ", rank);
    return {std::min(rank, peer), std::max(rank, peer)};
  }
  std::vector<int> all(size);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

Plan make_plan(const cgx_collective_t& call, int rank, int size, BuffersUsed used) {
  Plan plan;
  plan.verb = &kVerbs[in_range("verb", call.verb, 0, std::ssize(kVerbs) - 1, "a cgx_verb_t")];
  plan.dtype = in_range<Dtype>("dtype", call.dtype, 0, CGX_BFLOAT16, "a cgx_dtype_t");
  plan.op = in_range<Op>("op", call.op, 0, CGX_PRODUCT, "sum, avg, min, max, product");
  in_range("divisor", call.divisor, 0, INT64_MAX, "1 or more, or 0 for the number of ranks");
  check_segments(call, kMostElements / size);
  check_lists(call, plan, used);
  check_splits(call, *plan.verb, size);

  plan.rank = rank;
  plan.size = size;
  plan.members = members_of(call, rank, size);
  plan.noise_rank = call.noise_rank ? *call.noise_rank : rank;
  require(plan.noise_rank >= 0, CGX_INVALID_ARGUMENT, "noise_rank is ", plan.noise_rank,
          "; accepted: 0 or more");
  plan.divisor = call.divisor != 0 ? call.divisor : size;
  plan.input = static_cast<const std::byte*>(call.inputs ? first_of(call.inputs, call.num_segments)
                                                         : call.input);
  plan.output = static_cast<std::byte*>(call.outputs ? first_of(call.outputs, call.num_segments)
                                                     : call.output);
  const bool in_one_buffer = !call.inputs && !call.outputs;
  plan.block_numel = in_one_buffer ? call.block_numel : 0;
  bool compressed = false;
  int64_t end = plan.block_numel;  // elements that a buffer, or a block of it, must have
  for (int64_t i = 0; i < call.num_segments; ++i) {
    const auto& given = call.segments[i];
    const cgx_config_t config = segment_config(call, given);
    Segment segment;
    segment.numel = given.numel;
    segment.rounding = rounding_of(config);
    segment.example = given.example;
    segment.seed = call.seeds ? static_cast<uint64_t>(call.seeds[i])
                              : segment_seed(static_cast<uint64_t>(call.seed), i);
    if (call.device_seeds) {
      segment.seed_at = reinterpret_cast<const uint64_t*>(call.device_seeds + i);
    } else if (call.device_seed) {
      segment.seed_at = reinterpret_cast<const uint64_t*>(call.device_seed);
      segment.seed_number = i;
    }
    segment.input_at =
        call.inputs ? distance(plan.input, call.inputs[i]) : plan.bytes(given.offset);
    segment.output_at =
        call.outputs ? distance(plan.output, call.outputs[i]) : plan.bytes(given.offset);
    if (call.residuals) segment.residual = static_cast<std::byte*>(call.residuals[i]);
    // With splits, sizes differ between ranks. Fields that ranks compare must not depend on them.
    set_codecs(config, plan.dtype, call.input_splits ? kMostElements : given.numel, &segment);
    if (segment.residual) check_feedback(segment.codecs.each, segment.rounding);
    compressed |= given.bits != kExactBits && !compressor_entry(config.compressor).exact;
    end = std::max(end, given.offset + given.numel);
    plan.segments.push_back(segment);
  }
  if (in_one_buffer) plan.block_numel = end;
  for (Segment& segment : plan.segments)  // with splits, block_numel is the size of a row
    segment.block_bytes = call.input_splits ? 0 : plan.bytes(plan.block_numel);
  require(!compressed || plan.op == Op::kSum || plan.op == Op::kAvg || !plan.verb->reduces,
          CGX_UNSUPPORTED, "op ", op_name(call.op),
          " is not supported for compressed values: use sum or avg, or bits=32 (uncompressed)");
  if (used.input && !call.inputs)
    check_pointer(call.input, buffer_numel(plan, end, plan.verb->blocks_in, call.input_splits),
                  "input");
  if (used.output && !call.outputs)
    check_pointer(call.output, buffer_numel(plan, end, plan.verb->blocks_out, call.output_splits),
                  "output");
  if (plan.verb->exchanges()) {
    plan.has_splits = call.input_splits != nullptr;
    plan.sends =
        call.input_splits ? split_blocks(call, plan, call.input_splits) : plan.equal_blocks();
    plan.receives =
        call.output_splits ? split_blocks(call, plan, call.output_splits) : plan.equal_blocks();
  }
  plan.algorithm = static_cast<cgx_algorithm_t>(call.config.algorithm);
  return plan;
}

std::optional<uint64_t> shared_seeds(const Plan& plan) {
  std::optional<uint64_t> hash;
  for (const auto& segment : plan.segments) {
    const CodecSettings& codec = segment.codecs[Stage::kScatter];
    if (codec.bits != kExactBits && codec.compressor == CGX_RANDK)
      hash = fnv1a(std::as_bytes(std::span(&codec.seed, 1)), hash.value_or(0));
  }
  return hash;
}

Agreement make_agreement(const cgx_collective_t& call, const Plan& plan) {
  static_assert(std::has_unique_object_representations_v<Agreement>);
  Agreement agreement;
  agreement.verb = call.verb;
  agreement.dtype = call.dtype;
  agreement.op = call.op;
  agreement.launch = call.launch;
  agreement.num_segments = call.num_segments;
  if (!plan.verb->shards()) agreement.block_numel = plan.block_numel;
  if (plan.op == Op::kAvg) agreement.divisor = plan.divisor;
  agreement.numel = plan.numel();
  agreement.shared_seeds = shared_seeds(plan).value_or(0);
  agreement.config =
      agreed_config(call.num_segments > 0 ? segment_config(call, call.segments[0]) : call.config,
                    static_cast<int64_t>(plan.algorithm));
  agreement.segments_hash = hash_segments(call) ^ plan.packing_hash;
  return agreement;
}

bool agreements_match(const Agreement& left, const Agreement& right) {
  if (of_other_launches(left, right)) return false;
  Agreement other = right;
  other.launch = left.launch;
  return std::memcmp(&left, &other, sizeof(Agreement)) == 0;
}

std::string difference(const Agreement& left, const Agreement& right) {
  struct Row {
    const char* name;
    std::string (*text)(const Agreement&);
  };
  static const Row rows[] = {
      {"verb", [](const Agreement& a) -> std::string { return verb_name(a.verb); }},
      {"dtype", [](const Agreement& a) -> std::string { return dtype_name(a.dtype); }},
      {"numel", [](const Agreement& a) { return std::to_string(a.numel); }},
      {"op", [](const Agreement& a) -> std::string { return op_name(a.op); }},
      {"divisor", [](const Agreement& a) { return std::to_string(a.divisor); }},
      {"number of segments", [](const Agreement& a) { return std::to_string(a.num_segments); }},
      {"elements of a block or row",
       [](const Agreement& a) { return std::to_string(a.block_numel); }},
      {"the seed of the random indices",
       [](const Agreement& a) { return std::to_string(a.shared_seeds); }},
  };
  std::string text;
  if (of_other_launches(left, right))
    text = join("launch ", left.launch, " against ", right.launch,
                " of one program (if a launch failed on some ranks only, they are out of step: "
                "restart all ranks)");
  const auto compare = [&](std::string_view name, const std::string& a, const std::string& b) {
    if (a != b) text += join(text.empty() ? "" : ", ", name, " ", a, " against ", b);
  };
  for (const auto& row : rows) compare(row.name, row.text(left), row.text(right));
  for (size_t i = 0; i < kAgreedFields; ++i) {
    const ConfigField& field = config_table()[i];
    compare(field.name, config_name(field, left.config[i]), config_name(field, right.config[i]));
  }
  return text.empty() ? "sizes or settings of segments or, on GPUs, the name" : text;
}

}  // namespace cgx
