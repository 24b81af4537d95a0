// The codecs of all compressors, without ranks.
//
//   1. All CPU targets give the same bits in every bucket format, in selection and in rotation.
//   2. Codecs: residuals equal the quantization errors, pieces match parts of the whole message,
//      and wrong lengths are rejected.
//   3. The Elias-Fano code of indices: valid and invalid bytes.
//
// Exits with 1 if any check failed.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/hash.h"
#include "base/status.h"
#include "buffers.h"
#include "checks.h"
#include "compressor/codec.h"
#include "compressor/indices.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

using namespace test;

// ---- 1. targets ----

struct FormatRow {
  BucketFormat format;
  std::vector<int> bits;
  RoundingMode mode;
};
const FormatRow kFormats[] = {
    {BucketFormat::kUniform, {1, 2, 3, 4, 5, 6, 7, 8}, RoundingMode::kStochastic},
    {BucketFormat::kLevels, {1, 2, 3, 4}, RoundingMode::kNearest},
    {BucketFormat::kSign, {1}, RoundingMode::kNearest},
    {BucketFormat::kOnebit, {1}, RoundingMode::kNearest},
    {BucketFormat::kTernary, {2}, RoundingMode::kStochastic},
    {BucketFormat::kQsgd, {2, 3, 4, 5, 6, 7, 8}, RoundingMode::kStochastic},
    {BucketFormat::kMagnitudes, {2, 3, 4, 5, 6, 7, 8}, RoundingMode::kNearest},
};

// The digest of all bytes that targets and codecs produced. Builds for other processors must match.
uint64_t digest = fnv1a({});

void note(const Unaligned& bytes) { digest = fnv1a(bytes.bytes(), digest); }

// The payload of a NaN after a rotation depends on the processor.
void make_one_nan(std::byte* values, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i)
    if (std::isnan(widened(Dtype::kFloat32, values + 4 * i)))
      store(Dtype::kFloat32, std::bit_cast<float>(kFloat32Nan), values + 4 * i);
}

// Runs work(kernels, memory) on every target, with `bytes` bytes of memory; results must be equal.
template <typename Work>
void same_by_all(int64_t bytes, const std::string& where, const Work& work) {
  std::vector<Unaligned> results;
  for (const Kernels* target : available_kernels()) {
    Unaligned& result = results.emplace_back(bytes);
    work(*target, result.data());
    CHECK(result.guard_intact() && result == results.front(), join(target->name, " ", where));
  }
  note(results.front());
}

void test_format(const FormatRow& row, int bits, Dtype dtype, Data kind, int64_t bucket_size) {
  // For other formats, codecs widen the values to fp32 first.
  if (dtype != Dtype::kFloat32 && row.format != BucketFormat::kUniform) return;
  std::mt19937 random(bits);
  for (const int64_t numel : {int64_t{1}, int64_t{17}, int64_t{1300}}) {
    const BucketRun run{.numel = numel,
                        .first_index = 5 * bucket_size,
                        .bucket_size = bucket_size,
                        .bits = bits,
                        .format = row.format,
                        .clip = kind == Data::kHugeRange};
    const std::string where =
        join("format ", int(row.format), " bits ", bits, " dtype ", int(dtype), " data ", int(kind),
             " bucket ", bucket_size, " numel ", numel);
    const Rounding rounding{.mode = row.mode, .seed = 9, .rank = 1, .phase = 1};
    const Unaligned values = stored(dtype, make_data(kind, numel, 3));
    int64_t bytes = 0;
    for (int64_t first = 0; first < numel; first += bucket_size)
      bytes += header_bytes(row.format) +
               field_bytes(row.format, std::min(bucket_size, numel - first), bits);
    same_by_all(bytes, where, [&](const Kernels& kernels, std::byte* records) {
      kernels.quantize(dtype, values.data(), run, rounding, records);
    });
    if (dtype == Dtype::kFloat32) {
      same_by_all(numel * 4 + bytes, where, [&](const Kernels& kernels, std::byte* memory) {
        kernels.quantize_keeping(reinterpret_cast<const float*>(values.data()), run, rounding,
                                 memory + numel * 4, reinterpret_cast<float*>(memory));
      });
    }
    // Bytes from encoders, and random bytes.
    Unaligned records(bytes);
    kernels().quantize(dtype, values.data(), run, rounding, records.data());
    for (const bool foreign : {false, true}) {
      if (foreign)
        for (int64_t i = 0; i < bytes; ++i) records.data()[i] = static_cast<std::byte>(random());
      same_by_all(numel * size_of(dtype), where, [&](const Kernels& kernels, std::byte* out) {
        kernels.dequantize(records.data(), run, dtype, out);
      });
      const std::vector<float> base(static_cast<size_t>(numel), -0.0f);
      same_by_all(numel * 4, where, [&](const Kernels& kernels, std::byte* out) {
        kernels.dequantize_add(records.data(), run, base.data(), reinterpret_cast<float*>(out));
      });
    }
  }
}

// The indices must equal those that sorting gives.
void test_select(Data kind, int64_t numel, int64_t k) {
  const std::vector<float> values = make_data(kind, numel, 8);
  std::vector<uint32_t> order(static_cast<size_t>(numel));
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](uint32_t i) {  // all NaN are equal
    return std::min(std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu, 0x7f800001u);
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return key(a) > key(b); });
  order.resize(static_cast<size_t>(k));
  std::sort(order.begin(), order.end());
  for (const Kernels* target : available_kernels()) {
    std::vector<uint32_t> indices(static_cast<size_t>(k));
    target->select_largest(values.data(), numel, k, indices.data());
    CHECK(indices == order, join(target->name, " ", k, " of ", numel, " data ", int(kind)));
  }
}

void test_targets() {
  for (int k = 0; k < static_cast<int>(Data::kEnd); ++k) {
    const auto kind = static_cast<Data>(k);
    for (const FormatRow& row : kFormats)
      for (const int bits : row.bits)
        for (const Dtype dtype : kDtypes)
          for (const int64_t bucket_size : {7, 64, 512, 4096})
            test_format(row, bits, dtype, kind, bucket_size);
    for (const int64_t numel : {1, 15, 16, 1000, 4099})
      for (const int64_t each : {int64_t{1}, numel / 100, numel / 2, numel})
        if (each > 0) test_select(kind, numel, each);
    const std::vector<float> values = make_data(kind, 5000, 6);
    const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
    for (int size = 2; size <= 1024; size *= 2) {
      same_by_all(4 * 5000, join("rotation ", size), [&](const Kernels& kernels, std::byte* out) {
        std::memcpy(out, bytes, 4 * 5000);
        kernels.rotate(reinterpret_cast<float*>(out), 5000, size);
        make_one_nan(out, 5000);
      });
    }
    for (const Dtype to : {Dtype::kFloat16, Dtype::kBfloat16}) {
      same_by_all(2 * 5000, "noise", [&](const Kernels& kernels, std::byte* out) {
        kernels.convert_noisily(Dtype::kFloat32, values.data(), 5000, 64, {.seed = 3}, to, out);
      });
    }
  }
}

// A rotation and its inverse give the values back, up to rounding.
void test_rotation() {
  for (const int64_t numel : {1, 40, 512, 5000}) {
    for (int size = 2; size <= 1024; size *= 2) {
      const std::vector<float> values = make_data(Data::kNormal, numel, 6);
      std::vector<float> turned = values;
      kernels().rotate(turned.data(), numel, size);
      CHECK((turned != values) == (numel >= size), join(size, " of ", numel));
      kernels().rotate_back(turned.data(), numel, size);
      float worst = 0;
      for (size_t i = 0; i < values.size(); ++i)
        worst = std::max(worst, std::abs(turned[i] - values[i]));
      CHECK(worst < 1e-4f, join(size, " of ", numel, ": ", worst));
    }
  }
}

// ---- 2. codecs ----

// Every compressor of the table, with several settings.
std::vector<CodecSettings> all_settings() {
  std::vector<CodecSettings> rows;
  const auto add = [&](cgx_compressor_t compressor, int bits, const auto&... change) {
    for (const Dtype dtype : kDtypes) {
      for (const bool skip : {false, true}) {
        CodecSettings settings{.dtype = dtype, .bits = bits, .skip_incomplete_buckets = skip};
        settings.compressor = compressor;
        settings.density = 50000000;  // 5 %
        settings.value_bits = kExactBits;
        settings.seed = 77;
        (change(settings), ...);
        rows.push_back(settings);
      }
    }
  };
  const auto value_bits = [](int bits) {
    return [bits](CodecSettings& settings) { settings.value_bits = bits; };
  };
  const auto density = [](int64_t billionths) {
    return [billionths](CodecSettings& settings) { settings.density = billionths; };
  };
  const auto rate = [](double bits) {
    return [bits](CodecSettings& settings) { settings.rate = static_cast<int64_t>(1e9 * bits); };
  };
  const auto rotation = [](int size) {
    return [size](CodecSettings& settings) { settings.rotation = size; };
  };
  add(CGX_UNIFORM, kExactBits);
  for (const int bits : {1, 3, 4, 8}) add(CGX_UNIFORM, bits);
  for (const int bits : {1, 2, 3, 4}) add(CGX_LEVELS, bits);
  for (const int bits : {2, 3, 4, 5, 6, 7, 8}) add(CGX_QSGD, bits);
  for (const auto row : {CGX_SIGN, CGX_ONEBIT, CGX_TERNARY, CGX_HALF}) add(row, 4);
  for (const auto row : {CGX_MXFP8, CGX_MXFP8_E5M2, CGX_MXFP4, CGX_NVFP4}) {
    add(row, 4);
    add(row, 4, rotation(32));
  }
  add(CGX_TERNARY, 4, [](CodecSettings& settings) { settings.clip = true; });
  for (const int bits : {1, 2, 3, 4, 5, 6, 7, 8, 16, 32}) add(CGX_TOPK, 4, value_bits(bits));
  for (const int64_t billionths : {1, 1000000000}) add(CGX_TOPK, 4, density(billionths));
  for (const int64_t billionths : {1, 50000000, 1000000000}) add(CGX_RANDK, 4, density(billionths));
  for (const int size : {2, 32, 1024})
    for (const auto row : {CGX_UNIFORM, CGX_LEVELS, CGX_ONEBIT}) add(row, 2, rotation(size));
  for (const double bits : {0.25, 2.0, 3.4, 8.0}) add(CGX_ENTROPY, 4, rate(bits));
  add(CGX_LOSSLESS, 4);
  return rows;
}

// The bytes and values of a bucket do not depend on the surrounding buffer.
void test_codec_row(const CodecSettings& settings, RoundingMode mode, Data kind, int64_t numel) {
  const std::string where = join(codec_entry(settings).name, " bits ", settings.bits, " skip ",
                                 settings.skip_incomplete_buckets, " numel ", numel, " wire ",
                                 int(settings.dtype), " density ", settings.density, " value_bits ",
                                 settings.value_bits, " rotation ", settings.rotation, " rate ",
                                 settings.rate, " rounding ", int(mode), " data ", int(kind));
  const auto codec = make_codec(settings);
  const FixedLengthCodec* fixed = codec->fixed_length();
  CHECK((fixed != nullptr) == codec_entry(settings).fixed_length, where);
  const bool exact = settings.bits == kExactBits;
  const bool lossless = settings.compressor == CGX_LOSSLESS;
  const bool whole = exact || settings.compressor == CGX_HALF;
  if (fixed) CHECK(codec->grain() == (whole ? 1 : settings.bucket_size), where);
  if (!fixed) CHECK(numel <= codec->grain(), where);

  // Values of the wire dtype encode to the same bytes with and without widening.
  const Unaligned values = stored(settings.dtype, make_data(kind, numel, 4));
  Unaligned wide(numel * 4);
  kernels().convert(settings.dtype, values.data(), Dtype::kFloat32, wide.data(), numel);
  const Rounding rounding{.mode = mode, .seed = 5, .rank = 2, .phase = 1};
  const int64_t most = codec->max_bytes(numel);
  Unaligned message(most), message_of_wide(most);
  const int64_t bytes =
      codec->encode(settings.dtype, values.data(), numel, 0, rounding, message.data());
  CHECK(fixed ? bytes == most : bytes <= most, where);
  const int64_t again =
      codec->encode(Dtype::kFloat32, wide.data(), numel, 0, rounding, message_of_wide.data());
  // Raw values keep the payload of a NaN unless they are converted.
  const bool raw = whole || lossless || settings.skip_incomplete_buckets;
  const bool may_differ = raw && (kind == Data::kNonFinite || kind == Data::kAnyBits);
  CHECK(bytes == again && (may_differ || message == message_of_wide), where);
  CHECK(message.guard_intact() && message_of_wide.guard_intact(), where);

  const std::span<const std::byte> encoded(message_of_wide.data(), static_cast<size_t>(bytes));
  Unaligned decoded(numel * 4);
  codec->decode(encoded, numel, 0, Dtype::kFloat32, decoded.data());
  CHECK(decoded.guard_intact(), where);
  const auto* floats = reinterpret_cast<const float*>(decoded.data());
  note(message_of_wide);
  Unaligned decoded_with_one_nan = decoded;
  make_one_nan(decoded_with_one_nan.data(), numel);
  note(settings.rotation ? decoded_with_one_nan : decoded);

  // Adding to 0 gives the decoded values, except for the sign of zeros and the payload of NaNs.
  Unaligned sum(numel * 4), expected_sum(numel * 4);
  std::memset(sum.data(), 0, static_cast<size_t>(numel * 4));
  std::memset(expected_sum.data(), 0, static_cast<size_t>(numel * 4));
  auto* in_place = reinterpret_cast<float*>(sum.data());
  codec->decode_add(encoded, numel, 0, in_place, in_place);
  auto* expected = reinterpret_cast<float*>(expected_sum.data());
  kernels().add(Dtype::kFloat32, floats, expected, expected, numel);
  CHECK(sum == expected_sum, where);

  // The residual is the quantization error.
  Unaligned keeping(most), lost(numel * 4), expected_lost(numel * 4);
  const auto* source = reinterpret_cast<const float*>(wide.data());
  const int64_t kept = codec->encode_keeping(source, numel, 0, rounding, keeping.data(),
                                             reinterpret_cast<float*>(lost.data()));
  kernels().subtract(source, floats, reinterpret_cast<float*>(expected_lost.data()), numel);
  CHECK(kept == bytes && keeping == message_of_wide && lost == expected_lost, where);

  // The same if the residual overwrites the values.
  Unaligned message_again(most), replaced = wide;
  auto* both = reinterpret_cast<float*>(replaced.data());
  codec->encode_keeping(both, numel, 0, rounding, message_again.data(), both);
  CHECK(message_again == message_of_wide && replaced == expected_lost, where);

  // A piece that begins at a multiple of the grain encodes to its part of the message.
  if (fixed && numel > 1024) {
    const int64_t start = whole ? 700 : codec->grain();
    const int64_t piece_bytes = fixed->max_bytes(numel) - fixed->offset(start);
    Unaligned piece(piece_bytes), piece_values((numel - start) * 4);
    codec->encode(Dtype::kFloat32, wide.data() + start * 4, numel - start, start, rounding,
                  piece.data());
    CHECK(std::memcmp(piece.data(), encoded.data() + fixed->offset(start),
                      static_cast<size_t>(piece_bytes)) == 0,
          where);
    codec->decode({piece.data(), static_cast<size_t>(piece_bytes)}, numel - start, start,
                  Dtype::kFloat32, piece_values.data());
    CHECK(std::memcmp(piece_values.data(), decoded.data() + start * 4,
                      static_cast<size_t>((numel - start) * 4)) == 0,
          where);
  }
  for (const int64_t length : {bytes - 1, bytes + 1, int64_t{0}}) {
    if (length < 0 || length == bytes) continue;
    std::vector<std::byte> other(message_of_wide.data(),
                                 message_of_wide.data() + std::min(bytes, length));
    other.resize(static_cast<size_t>(length));
    const auto wrong = [&] { codec->decode(other, numel, 0, Dtype::kFloat32, decoded.data()); };
    CHECK(error_of(wrong, CGX_INVALID_ARGUMENT) != "", join(where, " of ", length, " bytes"));
  }
}

void test_codecs() {
  for (const CodecEntry& entry : codec_table()) {
    CHECK(std::string(entry.name) != "" && std::string(entry.description) != "", entry.name);
  }
  for (const int bits : {-1, 0, 9, 16, 33}) {
    const std::string error =
        error_of([bits] { make_codec({.bits = bits}); }, CGX_INVALID_ARGUMENT);
    CHECK(contains(error, join("bits=", bits)), error);
  }
  for (const int64_t bucket_size : {int64_t{0}, int64_t{-512}}) {
    const auto make = [=] { make_codec({.bits = 4, .bucket_size = bucket_size}); };
    CHECK(contains(error_of(make, CGX_INVALID_ARGUMENT), "bucket_size="), "bucket_size");
  }
  for (const CodecSettings& settings : all_settings()) {
    // The targets' noise is compared in test_targets; the blocks of entropy contain their shift.
    std::vector<RoundingMode> modes = codec_entry(settings).roundings;
    if (settings.compressor != CGX_ENTROPY) modes.resize(1);
    for (const RoundingMode mode : modes) {
      for (const int64_t numel : {0, 1, 17, 511, 512, 1030, 5000})
        test_codec_row(settings, mode, Data::kNormal, numel);
      for (int kind = 0; kind < static_cast<int>(Data::kEnd); ++kind)
        test_codec_row(settings, mode, static_cast<Data>(kind), 1100);
    }
  }
}

// ---- 3. indices ----

std::string read_error(const std::vector<std::byte>& bytes, int64_t numel, int64_t count) {
  std::vector<uint32_t> indices(static_cast<size_t>(count));
  return error_of([&] { read_indices(bytes.data(), numel, indices); }, CGX_INVALID_ARGUMENT);
}

void test_indices() {
  std::mt19937 random(1);
  for (const int64_t numel : {int64_t{1}, int64_t{2}, int64_t{64}, int64_t{65}, int64_t{4096},
                              int64_t{100003}, (int64_t{1} << 32) - 1}) {
    for (const int64_t count : {int64_t{1}, int64_t{3}, int64_t{64}, int64_t{1000}}) {
      if (count > numel) continue;
      std::vector<uint32_t> indices;
      while (static_cast<int64_t>(indices.size()) < count) {  // some at both ends
        const uint64_t drawn = (uint64_t{random()} << 32 | random()) % static_cast<uint64_t>(numel);
        const bool first = indices.empty();
        indices.push_back(static_cast<uint32_t>(first ? numel - 1 : drawn));
        std::sort(indices.begin(), indices.end());
        indices.erase(std::unique(indices.begin(), indices.end()), indices.end());
      }
      const std::string where = join(count, " of ", numel);
      std::vector<std::byte> bytes(static_cast<size_t>(indices_bytes(numel, count)));
      write_indices(indices, numel, bytes.data());
      std::vector<uint32_t> again(indices.size());
      read_indices(bytes.data(), numel, again);
      CHECK(again == indices, where);
      // At most the information content plus two bits an index.
      const double bits = std::log2(static_cast<double>(numel) / static_cast<double>(count)) + 3;
      CHECK(static_cast<double>(bytes.size()) <= static_cast<double>(count) * bits / 8 + 2, where);
    }
  }
  // 4 of 64: each has 4 low bits, 2 bytes in all. The high parts set bits 0, 2, 4, 6 of 1 byte.
  const std::vector<uint32_t> indices = {1, 17, 33, 49};
  std::vector<std::byte> bytes(3);
  CHECK(indices_bytes(64, 4) == 3, "bytes");
  write_indices(indices, 64, bytes.data());
  CHECK(bytes[0] == std::byte{0x11} && bytes[1] == std::byte{0x11} && bytes[2] == std::byte{0x55},
        "as in docs/reference/compressor_formats.md");
  const auto with = [&](uint8_t low, uint8_t middle, uint8_t high) {
    return std::vector<std::byte>{std::byte{low}, std::byte{middle}, std::byte{high}};
  };
  CHECK(contains(read_error(with(0x11, 0x11, 0x15), 64, 4), "3 indices instead of 4"), "too few");
  CHECK(contains(read_error(with(0x11, 0x11, 0x00), 64, 4), "0 indices instead of 4"), "none");
  CHECK(contains(read_error(with(0x11, 0x11, 0xff), 64, 4), "among 64 values"), "not ascending");
  CHECK(contains(read_error(with(0x12, 0x11, 0x53), 64, 4), "index 1 among 64 values, after 2"),
        "descending");
  CHECK(contains(read_error(with(0x32, 0x54, 0x9f), 64, 4), "more than 4 indices"), "too many");
  CHECK(contains(read_error(with(0x11, 0x11, 0xd4), 64, 4), "among 64 values"), "too large");
}

}  // namespace
}  // namespace cgx

int main() {
  cgx::test_targets();
  cgx::test_rotation();
  cgx::test_codecs();
  cgx::test_indices();
  std::string names;
  for (const cgx::Kernels* kernels : cgx::available_kernels())
    names += std::string(" ") + kernels->name;
  return cgx::test::report(cgx::join(" on", names, ", digest ", cgx::digest));
}
