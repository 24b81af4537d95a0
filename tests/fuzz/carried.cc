// An allreduce whose messages the caller transfers (cgx.h, section 5). Any messages of the lengths
// of cgx_carried_plan are decoded or rejected. Buffers have exactly these lengths.
#include "cgx/cgx.h"
#include "input.h"

namespace {

using Bytes = std::vector<std::byte>;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  constexpr int kBits[] = {1, 2, 3, 4, 5, 6, 7, 8, 32};
  std::vector<cgx_segment_t> segments(input.below(4));
  int64_t numel = 0;
  for (auto& segment : segments) {
    segment = {numel,
               input.number<uint16_t>() % 300,
               1 + input.number<uint16_t>() % 300,
               kBits[input.below(9)],
               0,
               nullptr};
    numel += segment.numel;
  }
  auto call = cgx::make<cgx_collective_t>();
  call.dtype = input.below(3);
  call.op = input.below(5);
  call.config.algorithm = input.below(3);
  call.config.rounding = input.below(3);
  call.config.gather_bits = input.below(9);
  call.config.skip_incomplete_buckets = input.below(2);
  call.config.minimal_size = input.number<uint8_t>();
  call.segments = segments.data();
  call.num_segments = static_cast<int64_t>(segments.size());
  const size_t value_bytes = call.dtype == CGX_FLOAT32 ? 4 : 2;
  const Bytes values = input.pattern(numel * value_bytes);
  Bytes result(numel * value_bytes);
  call.input = values.data();
  call.output = result.data();

  auto carried = cgx::make<cgx_carried_t>();
  carried.size = 1 + input.below(5);
  carried.rank = input.below(6);
  carried.call = &call;
  call.config.compressor = input.below(CGX_NVFP4 + 1);
  if (call.config.compressor != CGX_UNIFORM) {  // all other compressors require this
    call.config.rounding = CGX_CODECS_OWN;
    call.config.gather_bits = call.config.skip_incomplete_buckets = 0;
    for (auto& segment : segments) segment.bits = segment.bits == 32 ? 32 : 4;
  }
  // Indices, lengths and seeds in a message may be invalid.
  const bool may_reject =
      CGX_TOPK <= call.config.compressor && call.config.compressor <= CGX_LOSSLESS;
  int32_t algorithm = 0;
  std::vector<int64_t> scatter(carried.size), gather(carried.size);
  if (cgx_carried_plan(&carried, &algorithm, scatter.data(), gather.data()) != CGX_OK) return 0;
  const int64_t longest = *std::max_element(gather.begin(), gather.end());
  if (algorithm == CGX_SRA) {
    const Bytes arrived = input.pattern(scatter[carried.rank] * (carried.size - 1));
    Bytes message(gather[carried.rank]);
    const bool reduced = cgx_carried_reduce(&carried, arrived.data(), arrived.size(),
                                            message.data(), message.size()) == CGX_OK;
    FUZZ_CHECK(reduced || may_reject);
  }
  const int64_t stride = std::max<int64_t>(0, longest + input.below(2) * input.number<int8_t>());
  const Bytes gathered = input.pattern(stride * carried.size);
  const bool decoded = cgx_carried_decode(&carried, gathered.data(), gathered.size()) == CGX_OK;
  const bool fits = carried.size == 1 || stride >= longest;
  FUZZ_CHECK(decoded == fits || (may_reject && !decoded));
  return 0;
}
