// Compares the code of the GPU kernels with the CPU kernels and codecs, bit for bit. HostGroup
// (host_group.h) runs this code on the host. GPU instructions for loads, reductions and
// conversions, the synchronization of lanes, and kernel launches are not covered here.
//
//   1. launches on the host
//   2. Encode, Reduce, Decode of random pieces
//   3. launches after a failure
//
// Exits with 1 if any check failed.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "base/float_mode.h"
#include "base/half.h"
#include "base/status.h"
#include "checks.h"
#include "codings.h"
#include "compressor/codec.h"
#include "float_data.h"
#include "host_group.h"
#include "kernel/cuda/aligned/decode.h"
#include "kernel/cuda/aligned/encode.h"
#include "kernel/cuda/aligned/exact.h"
#include "kernel/cuda/aligned/formats.h"
#include "kernel/cuda/aligned/reduce.h"
#include "kernel/cuda/assign.h"
#include "kernel/cuda/buckets.h"
#include "kernel/cuda/entry_points.h"
#include "kernel/cuda/with.h"
#include "kernel/cuda/work.h"
#include "kernel/kernels.h"
#include "strict_memory.h"

namespace cgx::device::cuda {
namespace {

using test::as_floats;
using test::Data;
using test::floats_of;
using test::kFill;
using test::kSanitized;
using test::make_values;
using test::Memory;
using test::one_of;
using test::padding;
using test::pick;
using test::random_bits;
using test::Space;
using test::Values;

// ---- 1. launches on the host ----

// The aligned kernels that have run, for one type of launch.
template <typename Launch>
std::set<std::string> variants_run;

template <typename Launch>
void note(const Launch& launch, const aligned::Variant& variant) {
  bool noisy = false;
  if constexpr (!std::is_same_v<Launch, Decode>)
    noisy = launch.rounding == RoundingMode::kStochastic && variant.bits != kExactBits &&
            variant.format == BucketFormat::kUniform &&
            (variant.encodes || std::is_same_v<Launch, Encode>);
  bool is_loaded = false;
  aligned::for_variants([&](const aligned::Variant& one) { is_loaded |= one == variant; });
  CHECK(is_loaded, "for_variants() visits the variant");
  variants_run<Launch>.insert(join(int(launch.dtype), " format ", int(variant.format), " bits ",
                                   int(variant.bits), " default ", variant.default_size, " own ",
                                   variant.own, " residual ", variant.residual, " encodes ",
                                   variant.encodes, noisy));
}

template <typename Value, typename Format, int kLanes, typename Launch>
void run_groups(const Launch& launch) {
  const Work work = work_of(launch.pieces, buckets_of);
  HostGroup<kLanes> group(pick(2) == 1);
  Memory buffer(Layout<HostGroup<kLanes>>::kBytes, std::byte{0xcd});
  const Place place = place_of(launch.regions, launch.fault);
  int32_t piece = 0;
  for (int64_t at = 0; at < work.items; ++at)
    run_bucket<Value, Format>(group, buffer.data(), launch, place,
                              find_item(launch.pieces, work, at, &piece));
}

template <typename Value, typename Launch>
void run_general(const Launch& launch, const Kernel& kernel) {
  const auto of_format = [&]<typename Format>(Format) {
    if (kernel.takers == Takers::kWarps) return run_groups<Value, Format, kWarpLanes>(launch);
    run_groups<Value, Format, kBlockLanes>(launch);
  };
  if (kernel.formats == Formats::kPlain) return of_format(UniformFormat{});
  if (kernel.formats == Formats::kAny) return of_format(AnyFormat{});
  if (kernel.formats == Formats::kBlocks) return of_format(BlocksFormat{});
  of_format(SparseFormat{});
}

// The aligned kernels that run here, because all would take minutes to compile. fp16 differs from
// bf16 in its conversions only. With sanitizers one format runs.
constexpr bool has_aligned(Dtype dtype, BucketFormat format, int bits) {
  const bool four = format == BucketFormat::kUniform && bits == 4;
  if (bits == kExactBits) return true;
  return kSanitized ? four && dtype == Dtype::kFloat32 : four || dtype != Dtype::kFloat16;
}
template <typename Value, typename Format>
constexpr bool kHasAligned = has_aligned(std::is_same_v<Value, Float32>   ? Dtype::kFloat32
                                         : std::is_same_v<Value, Float16> ? Dtype::kFloat16
                                                                          : Dtype::kBfloat16,
                                         Format::kFormat, Format::kBits);

// Runs a body of aligned/ for a number of groups.
template <typename Body>
void run_aligned_groups(const Body& body) {
  const auto groups = static_cast<uint32_t>(1 + pick(3));
  for (uint32_t first = 0; first < groups; ++first) {
    HostPair group(pick(2) == 1);
    body(group, first, groups);
  }
}

template <typename Value>
void run_aligned(const Encode& launch, const aligned::Variant& variant, const Work& work) {
  aligned::with_encode(variant, is_noisy(launch),
                       [&]<typename Format>(Format, auto lanes, auto noisy, auto residual) {
                         if constexpr (kHasAligned<Value, Format>)
                           run_aligned_groups([&](HostPair& group, uint32_t first, uint32_t step) {
                             alignas(16) std::byte memory[Format::template kMemoryBytes<noisy>];
                             aligned::encode<Value, Format, lanes, noisy, residual>(
                                 group, memory, launch, work, first, step);
                           });
                       });
}

template <typename Value>
void run_aligned(const Decode& launch, const aligned::Variant& variant, const Work& work) {
  aligned::with_format(variant, [&]<typename Format>(Format, auto lanes) {
    if constexpr (kHasAligned<Value, Format>)
      run_aligned_groups([&](HostPair& group, uint32_t first, uint32_t step) {
        alignas(16) std::byte scratch[kPairLanes * aligned::kScratchBytes];
        aligned::decode<Value, Format, lanes>(group, scratch, launch, work, first, step);
      });
  });
}

template <typename Value>
void run_aligned(const Reduce& launch, const aligned::Variant& variant, const Work& work) {
  const auto run = [&]<typename Format>(Format, auto lanes, auto noisy, auto own, auto residual,
                                        auto encodes) {
    if constexpr (kHasAligned<Value, Format>)
      run_aligned_groups([&](HostPair& group, uint32_t first, uint32_t step) {
        aligned::ReduceMemory<Format, noisy, encodes> memory;
        aligned::reduce<Value, Format, lanes, noisy, own, residual, encodes>(group, &memory, launch,
                                                                             work, first, step);
      });
  };
  if (variant.encodes) return aligned::with_records(variant, is_noisy(launch), run);
  aligned::with_values(variant, run);
}

template <typename Launch>
void run(const Launch& whole) {
  FloatMode mode;
  for_kernels(whole, [](const Launch& launch, const Kernel& kernel) {
    with_value(launch.dtype, [&]<typename Value>(Value) {
      if (!kernel.aligned) return run_general<Value>(launch, kernel);
      if (!has_aligned(launch.dtype, kernel.aligned->format, kernel.aligned->bits))
        return run_general<Value>(launch, general_kernel(launch.pieces.at[0]));
      const Work work = work_of(launch.pieces, aligned::tiles_of);
      note(launch, *kernel.aligned);
      if (kernel.aligned->bits != kExactBits)
        return run_aligned<Value>(launch, *kernel.aligned, work);
      run_aligned_groups([&](HostPair& group, uint32_t first, uint32_t step) {
        aligned::exact<Value>(group, launch, work, first, step);
      });
    });
  });
}

// ---- 2. random pieces ----

constexpr int64_t kBucketSizes[] = {1, 7, 64, 128, 512, 513, 1024, 1025, 8192, 8193, 100000};
constexpr int64_t kLengths[] = {0, 1, 17, 511, 512, 513, 3000, 65543};
constexpr Dtype kDtypes[] = {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBfloat16};

struct Shape {
  int64_t numel, bucket_size, first_index;
  Coding coding, reduced_coding;
  uint64_t seed;
};

std::unique_ptr<Codec> codec(Dtype dtype, const Shape& shape, const Coding& coding) {
  return test::codec_of(dtype, coding, shape.bucket_size, shape.seed);
}

// A random encoding that may be combined with `other`. Sparse ones and block formats combine with
// their own kind and with exact values.
Coding any_coding(int64_t bucket_size, const Coding& other = {}) {
  static const std::vector<Coding> all = test::codings();
  while (true) {
    const Coding& one = all[static_cast<size_t>(pick(static_cast<int64_t>(all.size())))];
    const bool alike =
        is_sparse(one) == is_sparse(other) && has_blocks(one.format) == has_blocks(other.format);
    const bool matches = alike || is_exact(one) || is_exact(other);
    if (matches && (!test::is_whole(one) || bucket_size <= kMostWholeOnDevices)) return one;
  }
}

// The piece under test, and up to two more at random positions around it.
std::vector<Shape> shapes_around(const Coding& coding, int64_t bucket_size, int64_t numel) {
  std::vector<Shape> shapes = {{numel, bucket_size, 0, coding, any_coding(bucket_size, coding), 0}};
  for (int64_t more = pick(3); more > 0; --more) {
    const int64_t size = one_of<int64_t>({1, 64, 100, 512, 2000});
    const Coding any = any_coding(size);
    shapes.push_back({pick(700), size, 0, any, any_coding(size, any), 0});
  }
  std::shuffle(shapes.begin(), shapes.end(), random_bits);
  for (Shape& shape : shapes) {
    shape.first_index = shape.bucket_size * one_of<int64_t>({0, 0, 1, 3, int64_t{1} << 33});
    shape.seed = random_bits() * uint64_t{0x100000001};
  }
  return shapes;
}

struct RandomRegions {
  explicit RandomRegions(int64_t bytes)
      : done(static_cast<uint64_t>(pick(5))), regions{pick(3) ? &done : nullptr, bytes} {}
  uint64_t done;
  Regions regions;
};
Copies copies_behind(int64_t region, int64_t count) {
  Copies copies;
  copies.count = static_cast<int32_t>(count);
  for (int i = 0; i < count; ++i) copies.distance[i] = 2 * region * (i + 1);
  return copies;
}
int64_t written_at(const Regions& regions) {
  return regions.done && *regions.done % 2 == 0 ? regions.bytes : 0;
}
int64_t read_at(const Regions& regions) {
  return regions.done && *regions.done % 2 == 1 ? regions.bytes : 0;
}

// The quantization errors of `floats`, as the dtype.
Memory lost_of(Dtype dtype, Memory& floats, const Codec& codec, const Memory& message,
               int64_t first_index, float scale) {
  const auto numel = static_cast<int64_t>(floats.size() / 4);
  Memory decoded(floats.size()), lost(static_cast<size_t>(numel * size_of(dtype)));
  codec.decode(message, numel, first_index, Dtype::kFloat32, decoded.data());
  kernels().subtract(floats_of(floats), floats_of(decoded), floats_of(decoded), numel);
  kernels().scale(floats_of(decoded), scale, dtype, lost.data(), numel);
  return lost;
}

// Returns the offset of a residual with random values.
int64_t add_residual(Dtype dtype, const Shape& shape, Data kind, Space* residuals) {
  const Memory values = make_values(dtype, shape.numel, kind).memory;
  return residuals->add(Memory(values.end() - shape.numel * size_of(dtype), values.end()));
}

// residuals_wanted: whether pieces have some; otherwise it is random for each.
void test_encode(Dtype dtype, RoundingMode rounding, Data kind, const std::vector<Shape>& shapes,
                 const std::string& where, std::optional<bool> residuals_wanted = {}) {
  Encode launch{.dtype = dtype, .rounding = rounding, .rank = 3, .phase = 1};
  std::vector<Values> inputs;
  std::vector<int64_t> message_at, residual_at;
  Space messages{test::alignment.messages}, residuals;
  for (const Shape& shape : shapes) {
    inputs.push_back(make_values(dtype, shape.numel, kind));
    message_at.push_back(messages.add(codec(dtype, shape, shape.coding)->max_bytes(shape.numel)));
    residual_at.push_back(
        residuals_wanted.value_or(pick(2)) ? add_residual(dtype, shape, kind, &residuals) : -1);
  }
  messages.actual.resize(messages.actual.size() + static_cast<size_t>(padding()), kFill);
  const auto region = static_cast<int64_t>(messages.actual.size());
  launch.copies = copies_behind(region, pick(4));
  messages.repeat(2 * (launch.copies.count + 1));
  RandomRegions exchanges(region);
  launch.regions = exchanges.regions;

  for (size_t i = 0; i < shapes.size(); ++i) {
    const Shape& shape = shapes[i];
    launch.pieces.at[launch.pieces.count++] = {.values = inputs[i].data(),
                                               .residual = residuals.place(residual_at[i]),
                                               .message = messages.actual.data() + message_at[i],
                                               .numel = shape.numel,
                                               .first_index = shape.first_index,
                                               .bucket_size = shape.bucket_size,
                                               .seed = shape.seed,
                                               .coding = shape.coding};
    const auto compressor = codec(dtype, shape, shape.coding);
    Memory message(static_cast<size_t>(compressor->max_bytes(shape.numel)));
    const Rounding noise{rounding, shape.seed, launch.rank, launch.phase};
    if (residual_at[i] < 0) {
      compressor->encode(dtype, inputs[i].data(), shape.numel, shape.first_index, noise,
                         message.data());
    } else {
      Memory floats =
          as_floats(dtype, inputs[i].data(), shape.numel, residuals.place(residual_at[i]));
      compressor->encode(Dtype::kFloat32, floats.data(), shape.numel, shape.first_index, noise,
                         message.data());
      residuals.expect(residual_at[i],
                       lost_of(dtype, floats, *compressor, message, shape.first_index, 1.0f));
    }
    for (int copy = 0; copy <= launch.copies.count; ++copy)
      messages.expect(message_at[i] + written_at(launch.regions) + 2 * region * copy, message);
  }
  run(launch);
  CHECK(messages.as_expected(), where);
  CHECK(residuals.as_expected(), where);
}

// The inputs and outputs of a Reduce.
struct Form {
  bool own, residual, encodes;
};

// form: of all pieces; otherwise it is random for each.
void test_reduce(Dtype dtype, RoundingMode rounding, Data kind, std::vector<Shape> shapes,
                 const std::string& where, const std::optional<Form>& form = {}) {
  Reduce launch{.dtype = dtype,
                .rounding = rounding,
                .divisor = one_of({1.0f, 2.0f, 3.0f, 16.0f}),
                .rank = 2,
                .phase = 1};
  launch.size = static_cast<int32_t>(1 + pick(5));
  launch.own = static_cast<int32_t>(pick(launch.size + 1)) - 1;
  launch.op = one_of({Op::kSum, Op::kAvg});
  if (!form && pick(4) == 0) {  // only exact values support other ops
    launch.op = one_of({Op::kMin, Op::kMax, Op::kProduct});
    for (Shape& shape : shapes) shape.coding = shape.reduced_coding = {};
  }
  if (form) {
    launch.size += form->own;
    launch.own = form->own ? static_cast<int32_t>(pick(launch.size)) : -1;
    if (form->encodes && !form->own) launch.op = Op::kSum;
  }
  launch.residual_scale = launch.op == Op::kAvg ? launch.divisor : 1.0f;

  std::vector<std::vector<Values>> inputs;  // by piece, by rank
  std::vector<int64_t> message_at, reduced_at, result_at, residual_at;
  Space messages{test::alignment.messages}, reduced{test::alignment.messages}, results, residuals;
  for (const Shape& shape : shapes) {
    inputs.emplace_back();
    for (int rank = 0; rank < launch.size; ++rank)
      inputs.back().push_back(make_values(dtype, shape.numel, kind));
    message_at.push_back(messages.add(codec(dtype, shape, shape.coding)->max_bytes(shape.numel)));
    reduced_at.push_back(
        (form ? form->encodes : pick(3))
            ? reduced.add(codec(dtype, shape, shape.reduced_coding)->max_bytes(shape.numel))
            : -1);
    result_at.push_back(
        (form ? !form->encodes : pick(3)) ? results.add(shape.numel * size_of(dtype)) : -1);
    const bool votes = is_vote(shape.coding) || is_vote(shape.reduced_coding);
    residual_at.push_back((form ? form->residual : pick(2)) && !votes
                              ? add_residual(dtype, shape, kind, &residuals)
                              : -1);
  }
  launch.stride = static_cast<int64_t>(messages.actual.size()) + padding();
  messages.actual.resize(static_cast<size_t>(launch.stride), kFill);
  const int64_t region =
      std::max<int64_t>(launch.stride * launch.size, static_cast<int64_t>(reduced.actual.size()));
  messages.repeat(launch.size);
  messages.actual.resize(static_cast<size_t>(2 * region), kFill);
  reduced.actual.resize(static_cast<size_t>(region), kFill);
  launch.copies = copies_behind(region, pick(3));
  reduced.repeat(2 * (launch.copies.count + 1));
  RandomRegions exchanges(region);
  launch.regions = exchanges.regions;

  for (size_t i = 0; i < shapes.size(); ++i) {
    const Shape& shape = shapes[i];
    launch.pieces.at[launch.pieces.count++] = {
        .values = launch.own < 0 ? nullptr : inputs[i][static_cast<size_t>(launch.own)].data(),
        .result = results.place(result_at[i]),
        .residual = residuals.place(residual_at[i]),
        .message = messages.actual.data() + message_at[i],
        .reduced = reduced.place(reduced_at[i]),
        .numel = shape.numel,
        .first_index = shape.first_index,
        .bucket_size = shape.bucket_size,
        .seed = shape.seed,
        .coding = shape.coding,
        .reduced_coding = shape.reduced_coding};
    const auto from = codec(dtype, shape, shape.coding);
    const int64_t bytes = from->max_bytes(shape.numel);
    Memory sums, other(static_cast<size_t>(4 * shape.numel));
    for (int rank = 0; rank < launch.size; ++rank) {
      std::byte* values = inputs[i][static_cast<size_t>(rank)].data();
      Memory floats = as_floats(dtype, values, shape.numel,
                                rank == launch.own ? residuals.place(residual_at[i]) : nullptr);
      if (rank != launch.own) {
        std::byte* message =
            messages.actual.data() + read_at(launch.regions) + message_at[i] + rank * launch.stride;
        from->encode(dtype, values, shape.numel, shape.first_index,
                     {rounding, shape.seed, static_cast<uint32_t>(rank), 0}, message);
        from->decode({message, static_cast<size_t>(bytes)}, shape.numel, shape.first_index,
                     Dtype::kFloat32, floats.data());
      } else {
        test::vote(shape.coding, shape.bucket_size, floats_of(floats), shape.numel);
      }
      if (rank == 0) {
        sums = floats;
      } else {
        kernels().combine(launch.op, floats_of(floats), floats_of(sums), shape.numel);
      }
    }
    if (launch.op == Op::kAvg) kernels().divide(floats_of(sums), launch.divisor, shape.numel);
    // A result without a message to write is exact.
    const bool encodes = reduced_at[i] >= 0 || is_vote(shape.reduced_coding);
    const auto to = codec(dtype, shape, encodes ? shape.reduced_coding : Coding{});
    Memory message(static_cast<size_t>(to->max_bytes(shape.numel)));
    to->encode(Dtype::kFloat32, sums.data(), shape.numel, shape.first_index,
               {rounding, shape.seed, launch.rank, launch.phase}, message.data());
    Memory result(static_cast<size_t>(shape.numel * size_of(dtype)));
    to->decode(message, shape.numel, shape.first_index, dtype, result.data());
    for (int copy = 0; reduced_at[i] >= 0 && copy <= launch.copies.count; ++copy)
      reduced.expect(reduced_at[i] + written_at(launch.regions) + 2 * region * copy, message);
    if (residual_at[i] >= 0)
      residuals.expect(residual_at[i], lost_of(dtype, sums, *to, message, shape.first_index,
                                               launch.residual_scale));
    if (result_at[i] >= 0) results.expect(result_at[i], result);
  }
  messages.expected = messages.actual;
  run(launch);
  const std::string all =
      join(where, " op ", int(launch.op), " size ", launch.size, " own ", launch.own);
  CHECK(messages.as_expected(), all);
  CHECK(reduced.as_expected(), all);
  CHECK(results.as_expected(), all);
  CHECK(residuals.as_expected(), all);
}

void test_decode(Dtype dtype, Data kind, const std::vector<Shape>& shapes,
                 const std::string& where) {
  Decode launch{.dtype = dtype};
  std::vector<int64_t> message_at, result_at;
  Space messages{test::alignment.messages}, results;
  for (const Shape& shape : shapes) {
    message_at.push_back(messages.add(codec(dtype, shape, shape.coding)->max_bytes(shape.numel)));
    result_at.push_back(results.add(shape.numel * size_of(dtype)));
  }
  const auto region = static_cast<int64_t>(messages.actual.size());
  messages.repeat(2);
  RandomRegions exchanges(region);
  launch.regions = exchanges.regions;
  for (size_t i = 0; i < shapes.size(); ++i) {
    const Shape& shape = shapes[i];
    const auto compressor = codec(dtype, shape, shape.coding);
    launch.pieces.at[launch.pieces.count++] = {.result = results.actual.data() + result_at[i],
                                               .message = messages.actual.data() + message_at[i],
                                               .numel = shape.numel,
                                               .first_index = shape.first_index,
                                               .bucket_size = shape.bucket_size,
                                               .seed = shape.seed,
                                               .coding = shape.coding};
    std::byte* message = messages.actual.data() + message_at[i] + read_at(launch.regions);
    Values values = make_values(dtype, shape.numel, kind);
    const int64_t bytes =
        compressor->encode(dtype, values.data(), shape.numel, shape.first_index, {}, message);
    if (is_plain(shape.coding) && !is_exact(shape.coding) && bytes >= 8 && pick(4) == 0) {
      constexpr uint32_t kNoRankWrites[] = {0xfffd3f09, 0xfff629ff};  // two NaNs
      std::memcpy(message, kNoRankWrites, sizeof(kNoRankWrites));
    }
    Memory result(static_cast<size_t>(shape.numel * size_of(dtype)));
    compressor->decode({message, static_cast<size_t>(bytes)}, shape.numel, shape.first_index, dtype,
                       result.data());
    results.expect(result_at[i], result);
  }
  run(launch);
  CHECK(results.as_expected(), where);
}

void test_pieces() {
  // A third of the cells run for the largest length, and with sanitizers for all lengths, where
  // they have every pair of values of two axes.
  const auto runs = [](size_t coding, size_t bucket, size_t length) {
    const bool all = !kSanitized && kLengths[length] < 10000;
    return all || (coding + bucket + length) % 3 == 0;
  };
  int turn = 0;
  const std::vector<Coding> codings = test::codings();
  for (size_t i = 0; i < codings.size(); ++i) {
    for (size_t j = 0; j < std::size(kBucketSizes); ++j) {
      const Coding& coding = codings[i];
      const int64_t bucket_size = kBucketSizes[j];
      if (test::is_whole(coding) && bucket_size > kMostWholeOnDevices) continue;
      for (size_t k = 0; k < std::size(kLengths); ++k) {
        const int64_t numel = kLengths[k];
        if (!runs(i, j, k)) continue;
        if (numel > 10000 && bucket_size < 64 && coding.bits % 4 != 0) continue;  // tiny records
        const Dtype dtype = kDtypes[++turn % 3];
        const auto rounding = static_cast<RoundingMode>(turn / 3 % 3);
        const auto kind = static_cast<Data>(turn % static_cast<int>(Data::kEnd));
        const std::string where =
            join(test::text_of(coding), " bucket ", bucket_size, " numel ", numel, " dtype ",
                 int(dtype), " rounding ", int(rounding), " data ", int(kind), " turn ", turn);
        test_encode(dtype, rounding, kind, shapes_around(coding, bucket_size, numel), where);
        test_reduce(dtype, rounding, kind, shapes_around(coding, bucket_size, numel), where);
        test_decode(dtype, kind, shapes_around(coding, bucket_size, numel), where);
      }
    }
  }
}

// The buckets of a piece that is long enough for a second launch, for its rest.
int64_t buckets_to_cut(int64_t bucket_size) { return (1 << 16) / bucket_size + 9; }

void test_aligned_piece(const Coding& coding, int64_t bucket_size, int64_t buckets, int64_t rest,
                        Dtype dtype, RoundingMode rounding, Data kind) {
  const std::string where =
      join("aligned ", test::text_of(coding), ", bucket ", bucket_size, " x ", buckets, " + ", rest,
           " dtype ", int(dtype), " rounding ", int(rounding), " data ", int(kind));
  std::vector<Shape> shapes = shapes_around(coding, bucket_size, 0);
  const auto add = [&](int64_t numel, int64_t size) {
    shapes.push_back({.numel = numel,
                      .bucket_size = size,
                      .first_index = size * pick(100),
                      .coding = coding,
                      .reduced_coding = coding,
                      .seed = random_bits()});
  };
  add(buckets * bucket_size + rest, bucket_size);
  for (int64_t more = pick(4); more > 0; --more) {  // for the same kernel, and for others
    const bool same = pick(2) || coding.format == BucketFormat::kLevels;
    const int64_t size = same ? bucket_size : one_of<int64_t>({128, 256, 512, 1024});
    add(size * (1 + pick(9)), size);
  }
  std::shuffle(shapes.begin(), shapes.end(), random_bits);
  for (const bool residuals : {false, true})
    test_encode(dtype, rounding, kind, shapes, where, residuals);
  for (const Form form : {Form{false, false, false},
                          {true, false, false},
                          {false, false, true},
                          {true, false, true},
                          {true, true, true}})
    test_reduce(dtype, rounding, kind, shapes, where, form);
  test_decode(dtype, kind, shapes, where);
}

// After a failure, results and residuals become NaN, and nothing else is written.
void test_aligned_failure(Dtype dtype, const Coding& coding, int64_t bucket_size, int64_t buckets) {
  const uint32_t fault = 1;
  const int64_t width = size_of(dtype), numel = buckets * bucket_size;
  const auto bytes = static_cast<size_t>(numel * width);
  float nan = std::bit_cast<float>(kFloat32Nan);
  Memory nans(bytes);
  for (int64_t i = 0; i < numel; ++i)
    kernels().convert(Dtype::kFloat32, &nan, dtype, nans.data() + i * width, 1);
  Values values = make_values(dtype, numel, Data::kNormal);
  Space residuals, results;
  const int64_t residual = residuals.add(nans), result = results.add(nans);
  std::fill_n(residuals.place(residual), bytes, kFill);
  std::fill_n(results.place(result), bytes, kFill);
  const bool exact = is_exact(coding);
  // Messages must not be read or written: peers may be reading them.
  auto* const message = reinterpret_cast<std::byte*>(uintptr_t{1} << 40);
  const Piece piece{.values = values.data(),
                    .message = message,
                    .numel = numel,
                    .bucket_size = bucket_size,
                    .coding = coding,
                    .reduced_coding = coding};
  const std::string where =
      join(test::text_of(coding), " bucket ", bucket_size, " x ", buckets, " dtype ", int(dtype));
  const auto check = [&](const auto& launch) {
    for (Space* space : {&residuals, &results}) space->expected.clear();
    const Piece& used = launch.pieces.at[0];
    if (used.residual) residuals.expect(residual, nans);
    if (used.result) results.expect(result, nans);
    for_kernels(launch, [&](const auto&, const Kernel& kernel) {
      CHECK(kernel.aligned.has_value(), where);
    });
    run(launch);
    CHECK(residuals.as_expected() && results.as_expected(), where);
    std::fill_n(residuals.place(residual), bytes, kFill);
    std::fill_n(results.place(result), bytes, kFill);
  };
  Encode encode{.dtype = dtype, .pieces = {1, {piece}}, .fault = &fault};
  check(encode);
  Decode decode{.dtype = dtype, .pieces = {1, {piece}}, .fault = &fault};
  decode.pieces.at[0].result = results.place(result);
  check(decode);
  Reduce reduce{
      .dtype = dtype, .size = 2, .own = 1, .stride = 4096, .pieces = {1, {piece}}, .fault = &fault};
  reduce.pieces.at[0].result = results.place(result);
  check(reduce);
  reduce.pieces.at[0].result = nullptr;
  reduce.pieces.at[0].reduced = message;
  check(reduce);
  if (exact) return;
  reduce.pieces.at[0].residual = encode.pieces.at[0].residual = residuals.place(residual);
  check(reduce);
  check(encode);
}

void test_aligned_failures() {
  test::alignment = {16, 16};
  for (const Dtype dtype : kDtypes) {
    for (const int64_t buckets : {3, 7, 40}) {
      for (const int64_t bucket_size : {128, 256, 512, 1024}) {
        for (const uint8_t bits : {2, 4, 8})
          test_aligned_failure(dtype, {.bits = bits}, bucket_size, buckets);
        test_aligned_failure(dtype, {}, bucket_size, buckets);
      }
      for (const uint8_t bits : {2, 3, 4})
        test_aligned_failure(dtype, {.format = BucketFormat::kLevels, .bits = bits}, 512, buckets);
    }
  }
}

// Whole buckets at aligned addresses, and pieces that are cut. Every aligned kernel runs.
void test_aligned_pieces() {
  constexpr auto kUniform = BucketFormat::kUniform, kLevels = BucketFormat::kLevels;
  const struct {
    Coding coding;
    std::vector<int64_t> bucket_sizes;
    int64_t message_alignment;
  } cases[] = {
      {{.format = kUniform, .bits = 2}, {128, 256, 512, 1024}, 8},
      {{.format = kUniform, .bits = 4}, {128, 256, 512, 1024}, 8},
      {{.format = kUniform, .bits = 8}, {128, 256, 512, 1024}, 8},
      {{.format = kLevels, .bits = 2}, {512}, 2},
      {{.format = kLevels, .bits = 3}, {512}, 2},
      {{.format = kLevels, .bits = 4}, {512}, 2},
      {{.bits = kExactBits}, {128, 256, 512, 1024}, 16},
  };
  int turn = 0;
  for (const auto& each : cases) {
    test::alignment = {16, each.message_alignment};
    for (const int64_t bucket_size : each.bucket_sizes)
      for (const int64_t buckets : {int64_t{1}, int64_t{3}, int64_t{8}, int64_t{9}, int64_t{40},
                                    buckets_to_cut(bucket_size)})
        for (const Dtype dtype : kDtypes) {
          if (!has_aligned(dtype, each.coding.format, each.coding.bits)) continue;
          for (const RoundingMode rounding : {RoundingMode::kNearest, RoundingMode::kStochastic})
            test_aligned_piece(each.coding, bucket_size, buckets,
                               buckets == buckets_to_cut(bucket_size)
                                   ? one_of<int64_t>({0, 1, 17, bucket_size - 1})
                                   : 0,
                               dtype, rounding,
                               static_cast<Data>(++turn % static_cast<int>(Data::kEnd)));
        }
  }
  test::alignment = {16, 8};  // 2^20 + 7 values
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBfloat16})
    test_aligned_piece({.bits = 4}, 512, 2048, 7, dtype, RoundingMode::kStochastic, Data::kNormal);
  test_aligned_failures();
  test::alignment = {};
  if (kSanitized) return;
  // For 2 dtypes: uniform codes have 3 widths and 2 kinds of bucket sizes, levels 3 widths; for
  // fp16 one width. Each Encode has a residual or not, and uniform codes have noise or not. Reduce
  // has values with or without own ones; and records without own values, and with them with or
  // without residual.
  constexpr size_t kUniformCodes = 2 * 3 * 2 + 2, kLevelCodes = 2 * 3, kExact = 3;
  CHECK(variants_run<Decode>.size() == kUniformCodes + kLevelCodes + kExact, "Decode");
  CHECK(variants_run<Encode>.size() == 4 * kUniformCodes + 2 * kLevelCodes + kExact, "Encode");
  CHECK(variants_run<Reduce>.size() ==
            (2 + 2 + 4) * kUniformCodes + (2 + 1 + 2) * kLevelCodes + kExact,
        "Reduce");
}

// Compares a sum with the order of docs/reference/compressor_formats.md. Records show few errors of
// it, because their scales have only 8 bits.
template <int kChunk>
void test_sum_of_squares() {
  constexpr int kNumel = 512, kColumns = 16;
  const aligned::Tiling<kWarpLanes> tiling(Piece{.numel = 2 * kNumel, .bucket_size = kNumel});
  std::normal_distribution<float> normal;
  for (int turn = 0; turn < 10; ++turn) {
    const float by = one_of({1.0f, 0x1p-40f, 0x1p40f});
    std::vector<float> values(2 * kNumel);
    for (float& x : values) x = normal(random_bits);
    HostPair::Lanes<aligned::Values> lanes;
    for (int lane = 0; lane < kPairLanes; ++lane)
      for (int v = 0; v < aligned::kLaneValues; ++v)
        lanes[lane].at[v] = values[tiling.first_value(lane, kChunk) +
                                   v / kChunk * kChunk * tiling.lanes() + v % kChunk];
    HostPair group(pick(2) == 1);
    HostPair::Lanes<float> down, sums;
    down.fill(by);
    alignas(16) std::byte memory[aligned::kMostSquaresBytes];
    aligned::sum_squares<kChunk>(group, memory, lanes, down, sums);
    for (int first : {0, kNumel}) {
      float columns[kColumns] = {};
      for (int i = 0; i < kNumel; ++i) {
        const float scaled = values[first + i] * by;
        columns[i % kColumns] += scaled * scaled;
      }
      for (int half = kColumns / 2; half > 0; half /= 2)
        for (int j = 0; j < half; ++j) columns[j] += columns[j + half];
      const auto begin = sums.begin() + first / aligned::kLaneValues;
      CHECK(std::all_of(begin, begin + kWarpLanes, [&](float sum) { return sum == columns[0]; }),
            join("sum of squares, chunk ", kChunk, " bucket at ", first));
    }
  }
}

// ---- 3. launches after a failure ----

void test_fault() {
  const uint32_t fault = 1;
  for (const Coding& coding : test::codings()) {
    constexpr int64_t kNumel = 700;
    const std::string where = test::text_of(coding);
    std::vector<float> values(kNumel, 1.0f), result(kNumel), residual(kNumel),
        reduced(kNumel, 3.0f);
    const auto bytes_of = [](std::vector<float>& floats) {
      return reinterpret_cast<std::byte*>(floats.data());
    };
    const auto all_nan = [](const std::vector<float>& floats) {
      return std::ranges::all_of(floats,
                                 [](float x) { return std::bit_cast<uint32_t>(x) == kFloat32Nan; });
    };
    Piece piece{.values = bytes_of(values),
                .result = bytes_of(result),
                .residual = bytes_of(residual),
                .message = nullptr,  // not read
                .reduced = bytes_of(reduced),
                .numel = kNumel,
                .bucket_size = 512,
                .coding = coding,
                .reduced_coding = coding};
    run(Reduce{.dtype = Dtype::kFloat32,
               .rounding = RoundingMode::kStochastic,
               .op = Op::kSum,
               .size = 2,
               .own = 0,
               .residual_scale = 1.0f,
               .pieces = {1, {piece}},
               .fault = &fault});
    CHECK(all_nan(result) && all_nan(residual), where);

    // Messages must not be overwritten: peers may be reading the previous one.
    const std::vector<float> untouched(kNumel, 3.0f);
    CHECK(reduced == untouched, where);
    std::vector<float> message = untouched;
    piece.message = bytes_of(message);
    std::fill(residual.begin(), residual.end(), 0.0f);
    run(Encode{.dtype = Dtype::kFloat32, .pieces = {1, {piece}}, .fault = &fault});
    CHECK(all_nan(residual) && message == untouched, where);

    std::fill(result.begin(), result.end(), 0.0f);
    piece.message = nullptr;
    run(Decode{.dtype = Dtype::kFloat32, .pieces = {1, {piece}}, .fault = &fault});
    CHECK(all_nan(result), where);
  }
}

}  // namespace
}  // namespace cgx::device::cuda

int main() {
  cgx::device::cuda::test_pieces();
  cgx::device::cuda::test_aligned_pieces();
  cgx::device::cuda::test_sum_of_squares<4>();
  cgx::device::cuda::test_sum_of_squares<8>();
  cgx::device::cuda::test_fault();
  return cgx::test::report();
}
