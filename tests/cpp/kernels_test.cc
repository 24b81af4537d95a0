// The kernels, the half types, the noise, the codecs and the environment, without ranks.
//
//   1. CHECK and the data
//   2. a second, slow codec, straight from docs/wire_format.md, one bit at a time
//   3. base: philox, half, float_mode, env
//   4. the codec of every target against the slow one, to the bit
//   5. exact kernels of every target against plain loops
//   6. codecs
//
// Exits with 1 if any check failed.
#include "kernel/kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/float_mode.h"
#include "base/half.h"
#include "base/philox.h"
#include "base/status.h"
#include "compressor/codec.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace cgx {
namespace {

// ---- 1. CHECK and the data ----

int64_t passed = 0;
int64_t failed = 0;

void check(bool condition, const char* text, int line, const std::string& where) {
  if (condition) {
    ++passed;
    return;
  }
  ++failed;
  if (failed <= 20) std::fprintf(stderr, "line %d: %s is false: %s\n", line, text, where.c_str());
}
#define CHECK(condition, where) check((condition), #condition, __LINE__, (where))

// Runs `call` and returns the text of the Error it throws, "" if it throws none.
template <typename Call>
std::string error_of(const Call& call, cgx_status_t expected) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.status() == expected, error.what());
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// kLowest: of which a shifted grid may begin below the lowest number, and end above the highest.
enum class Data {
  kNormal,
  kHugeRange,
  kNonFinite,
  kLowest,
  kDenormal,
  kZeros,
  kConstant,
  kAnyBits,
  kEnd
};

std::vector<float> make_data(Data kind, int64_t numel, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(numel));
  for (float& x : values) {
    switch (kind) {
      case Data::kNormal:
        x = normal(random);
        break;
      case Data::kHugeRange:
        x = std::ldexp(normal(random), static_cast<int>(random() % 254) - 127);
        break;
      case Data::kNonFinite: {
        constexpr float kInf = std::numeric_limits<float>::infinity();
        constexpr float kSpecial[] = {kInf, -kInf, -0.0f, 3e38f, -3e38f};
        const uint32_t which = random() % 2000;
        x = which < 5    ? kSpecial[which]
            : which == 5 ? std::numeric_limits<float>::quiet_NaN()
            : which == 6 ? -std::numeric_limits<float>::quiet_NaN()
                         : normal(random);
        break;
      }
      case Data::kLowest:
        x = random() % 8 ? -std::fmin(std::fabs(normal(random)), 3.0f) * 1e38f
                         : -std::numeric_limits<float>::max();
        break;
      case Data::kDenormal:
        x = normal(random) * 1e-39f;
        break;
      case Data::kZeros:
        x = random() % 2 ? 0.0f : -0.0f;
        break;
      case Data::kConstant:
        x = 3.3f;
        break;
      case Data::kAnyBits:
      case Data::kEnd:
        x = std::bit_cast<float>(static_cast<uint32_t>(random()));
        break;
    }
  }
  return values;
}

constexpr RoundingMode kModes[] = {RoundingMode::kNearest, RoundingMode::kStochastic,
                                   RoundingMode::kShift};
constexpr Dtype kDtypes[] = {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBfloat16};

float widened(Dtype dtype, const std::byte* stored) {
  if (dtype == Dtype::kFloat32) {
    float value;
    std::memcpy(&value, stored, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, stored, sizeof(bits));
  return dtype == Dtype::kFloat16 ? widen_float16(bits) : widen_bfloat16(bits);
}

void store(Dtype dtype, float value, std::byte* stored) {
  if (dtype == Dtype::kFloat32) {
    std::memcpy(stored, &value, sizeof(value));
    return;
  }
  const uint16_t bits =
      dtype == Dtype::kFloat16 ? round_to_float16(value) : round_to_bfloat16(value);
  std::memcpy(stored, &bits, sizeof(bits));
}

// One byte after an aligned address: kernels must not care. What lies behind must stay.
class Unaligned {
 public:
  explicit Unaligned(int64_t bytes) : bytes_(static_cast<size_t>(bytes) + 1 + kGuard, kFill) {}
  std::byte* data() { return bytes_.data() + 1; }
  const std::byte* data() const { return bytes_.data() + 1; }
  bool guard_intact() const {
    return bytes_[0] == kFill &&
           std::all_of(bytes_.end() - kGuard, bytes_.end(), [](std::byte b) { return b == kFill; });
  }
  bool operator==(const Unaligned&) const = default;

 private:
  static constexpr int kGuard = 64;
  static constexpr std::byte kFill{0xa5};
  std::vector<std::byte> bytes_;
};

Unaligned stored(Dtype dtype, const std::vector<float>& values) {
  const auto width = size_of(dtype);
  Unaligned out(static_cast<int64_t>(values.size()) * width);
  for (size_t i = 0; i < values.size(); ++i) {
    store(dtype, values[i], out.data() + width * static_cast<int64_t>(i));
  }
  return out;
}

std::string describe(const Kernels& target, Dtype dtype, const BucketRun& run,
                     const Rounding& rounding, Data kind) {
  return join(target.name, " dtype ", static_cast<int>(dtype), " bits ", run.bits, " bucket ",
              run.bucket_size, " numel ", run.numel, " first ", run.first_index, " rounding ",
              static_cast<int>(rounding.mode), " data ", static_cast<int>(kind));
}

// ---- 2. the slow codec ----

int64_t slow_bytes(const BucketRun& run) {
  int64_t bytes = 0;
  for (int64_t start = 0; start < run.numel; start += run.bucket_size) {
    bytes += 8 + (std::min(run.bucket_size, run.numel - start) * run.bits + 7) / 8;
  }
  return bytes;
}

uint64_t multiply_words(uint64_t a, uint32_t b) { return uint64_t{static_cast<uint32_t>(a)} * b; }

float slow_noise(int64_t index, const Rounding& rounding) {
  const auto group = static_cast<uint64_t>(index) / 128;
  const auto e = static_cast<uint64_t>(index) % 128;
  const uint64_t counter = 16 * group + e % 16;
  uint64_t words[4] = {counter & 0xffffffff, counter >> 32, rounding.rank, rounding.phase};
  philox4x32_10(words, PhiloxKeys(rounding.seed), multiply_words);
  const uint64_t u = (words[e / 32] >> (e / 16 % 2 * 16)) & 0xffff;
  return static_cast<float>((static_cast<double>(u) + 0.5) / 65536);
}

bool below(float a, float b) {  // -0 < +0
  return a < b || (a == b && std::signbit(a) && !std::signbit(b));
}

void slow_quantize(const std::vector<float>& values, const BucketRun& run, const Rounding& rounding,
                   std::byte* records) {
  const float top = static_cast<float>((1 << run.bits) - 1);
  for (int64_t start = 0; start < run.numel; start += run.bucket_size) {
    const int64_t n = std::min(run.bucket_size, run.numel - start);
    const float* x = values.data() + start;
    float lo = x[0];
    float hi = x[0];
    bool finite = true;
    for (int64_t i = 0; i < n; ++i) {
      finite = finite && std::isfinite(x[i]);
      if (below(x[i], lo)) lo = x[i];
      if (below(hi, x[i])) hi = x[i];
    }
    const float extent = hi - lo;
    finite = finite && std::isfinite(extent);
    const float step = extent / top;
    const float inverse = 1.0f / step;
    const float nan = std::bit_cast<float>(kFloat32Nan);
    bool flat = !finite || step == 0 || std::isinf(inverse);
    const bool shifted = rounding.mode == RoundingMode::kShift && !flat;
    const float fraction = shifted ? slow_noise(run.first_index + start, rounding) : 0.5f;
    const float offset = (0.5f - fraction) * step;
    const float first = shifted ? lo + offset : lo;
    finite = finite && std::isfinite(first);
    flat = flat || !finite;
    const float header[2] = {finite ? first : nan, finite ? step : nan};
    std::memcpy(records, header, 8);
    std::byte* field = records + 8;
    const int64_t field_bytes = (n * run.bits + 7) / 8;
    std::memset(field, 0, static_cast<size_t>(field_bytes));
    records = field + field_bytes;
    if (flat) continue;
    for (int64_t i = 0; i < n; ++i) {
      const float r = rounding.mode == RoundingMode::kStochastic
                          ? slow_noise(run.first_index + start + i, rounding)
                          : fraction;
      const float difference = x[i] - lo;
      const float scaled = difference * inverse;
      const float sum = scaled + r;
      const int level = static_cast<int>(std::fmin(top, std::floor(sum)));
      for (int bit = 0; bit < run.bits; ++bit) {
        const int64_t at = i * run.bits + bit;
        field[at / 8] |= static_cast<std::byte>(((level >> bit) & 1) << (at % 8));
      }
    }
  }
}

std::vector<float> slow_dequantize(const std::byte* records, const BucketRun& run) {
  std::vector<float> values;
  for (int64_t start = 0; start < run.numel; start += run.bucket_size) {
    const int64_t n = std::min(run.bucket_size, run.numel - start);
    float header[2];
    std::memcpy(header, records, 8);
    const std::byte* field = records + 8;
    for (int64_t i = 0; i < n; ++i) {
      int level = 0;
      for (int bit = 0; bit < run.bits; ++bit) {
        const int64_t at = i * run.bits + bit;
        level |= ((std::to_integer<int>(field[at / 8]) >> (at % 8)) & 1) << bit;
      }
      const float product = static_cast<float>(level) * header[1];
      values.push_back(header[0] + product);
    }
    records = field + (n * run.bits + 7) / 8;
  }
  return values;
}

// ---- 3. base ----

void test_philox() {
  // The known answers of the paper's authors.
  struct Answer {
    uint64_t counter[4];
    uint64_t seed;
    uint32_t noise[4];
  };
  constexpr uint64_t kOnes = 0xffffffff;
  const Answer answers[] = {
      {{0, 0, 0, 0}, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{kOnes, kOnes, kOnes, kOnes},
       ~uint64_t{0},
       {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       0x299f31d0a4093822,
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const Answer& answer : answers) {
    uint64_t words[4];
    std::copy_n(answer.counter, 4, words);
    philox4x32_10(words, PhiloxKeys(answer.seed), multiply_words);
    for (int i = 0; i < 4; ++i) {
      CHECK(static_cast<uint32_t>(words[i]) == answer.noise[i], join("word ", i));
    }
  }
}

// The value nearest to x among all of a 16-bit format, ties to the even one: by comparing with the
// two neighbours. `floor_bits` is the representable value next to x towards zero.
uint16_t nearest(float x, uint16_t floor_bits, float (*widen)(uint16_t), double overflow) {
  const auto up_bits = static_cast<uint16_t>(floor_bits + 1);
  const double magnitude = std::fabs(static_cast<double>(x));
  const double down = std::fabs(static_cast<double>(widen(floor_bits)));
  const double up = std::isinf(widen(up_bits)) ? overflow : std::fabs(double{widen(up_bits)});
  if (magnitude - down < up - magnitude) return floor_bits;
  if (magnitude - down > up - magnitude) return up_bits;
  return floor_bits % 2 == 0 ? floor_bits : up_bits;
}

void test_half() {
  for (uint32_t i = 0; i < 0x10000; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    const float from_fp16 = widen_float16(bits);
    if ((i & 0x7fff) > 0x7c00) {
      CHECK(std::isnan(from_fp16), join("fp16 ", i));
      CHECK(round_to_float16(from_fp16) == kFloat16Nan, join("fp16 ", i));
    } else {
      const int exponent = static_cast<int>(i >> 10 & 31);
      const int mantissa = static_cast<int>(i & 0x3ff);
      const float magnitude = exponent == 31  ? std::numeric_limits<float>::infinity()
                              : exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                              : std::ldexp(1024.0f + mantissa, exponent - 25);
      const float expected = std::copysign(magnitude, i & 0x8000 ? -1.0f : 1.0f);
      CHECK(std::bit_cast<uint32_t>(from_fp16) == std::bit_cast<uint32_t>(expected),
            join("fp16 ", i));
      CHECK(round_to_float16(from_fp16) == bits, join("fp16 ", i));
    }
    const float from_bf16 = widen_bfloat16(bits);
    const bool nan = (i & 0x7fff) > 0x7f80;
    CHECK(std::bit_cast<uint32_t>(from_bf16) == i << 16, join("bf16 ", i));
    CHECK(round_to_bfloat16(from_bf16) == (nan ? kBfloat16Nan : bits), join("bf16 ", i));
  }

  std::mt19937 random(7);
  for (int i = 0; i < 1000000; ++i) {
    // Exponents around fp16's, the last kept bit and the half way point often exact.
    uint32_t bits = random();
    if (i % 2) bits = (bits & 0x807fffff) | ((98 + random() % 48) << 23);
    if (i % 3 == 0) bits &= ~uint32_t{0xfff};
    const float x = std::bit_cast<float>(bits);
    if (std::isnan(x)) {
      CHECK(round_to_float16(x) == kFloat16Nan, join("bits ", bits));
      CHECK(round_to_bfloat16(x) == kBfloat16Nan, join("bits ", bits));
      continue;
    }
    if (std::isinf(x)) continue;  // covered above
    const uint16_t bf16_floor = static_cast<uint16_t>(bits >> 16);
    CHECK(round_to_bfloat16(x) == nearest(x, bf16_floor, widen_bfloat16, 0x1p128),
          join("bits ", bits));
    // Truncation to fp16, by hand.
    const double magnitude = std::fabs(double{x});
    uint16_t fp16_floor = 0x7bff;
    if (magnitude < 65504) {
      int exponent;
      std::frexp(magnitude, &exponent);
      const int unit = std::max(exponent - 11, -24);
      const auto kept = static_cast<uint32_t>(std::floor(std::ldexp(magnitude, -unit)));
      fp16_floor = static_cast<uint16_t>(unit == -24 ? kept : ((unit + 24) << 10) + kept);
    }
    const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    fp16_floor = static_cast<uint16_t>(fp16_floor | sign);
    CHECK(round_to_float16(x) == nearest(x, fp16_floor, widen_float16, 65536), join("bits ", bits));
  }
}

void test_env() {
  const char* name = "CGX_TIMEOUT";
  unsetenv(name);
  CHECK(env_timeout_seconds() == 300, "unset");
  setenv(name, "", 1);
  CHECK(env_timeout_seconds() == 300, "empty");
  setenv(name, "0.5", 1);
  CHECK(env_timeout_seconds() == 0.5, "0.5");
  for (const char* text : {"0", "-1", "nan", "inf", "3s", " 3", "1e999"}) {
    setenv(name, text, 1);
    const std::string error = error_of([] { env_timeout_seconds(); }, CGX_INVALID_ARGUMENT);
    CHECK(contains(error, name) && contains(error, text) && contains(error, "seconds"), error);
  }
  unsetenv(name);

  name = "COMMUNICATOR_TYPE";
  unsetenv(name);
  CHECK(env_transport() == "AUTO", "unset");
  setenv(name, "shm", 1);
  CHECK(env_transport() == "SHM", "shm");
  setenv(name, "UCC", 1);
  const std::string error = error_of([] { env_transport(); }, CGX_INVALID_ARGUMENT);
  CHECK(contains(error, name) && contains(error, "UCC") && contains(error, "AUTO, SHM, MPI, NCCL"),
        error);
  unsetenv(name);

  unsetenv("OMPI_COMM_WORLD_SIZE");
  unsetenv("OMPI_COMM_WORLD_RANK");
  CHECK(!env_mpirun_world().has_value(), "no mpirun");
  setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
  CHECK(error_of([] { env_mpirun_world(); }, CGX_INVALID_ARGUMENT) != "", "size without rank");
  setenv("OMPI_COMM_WORLD_RANK", "4", 1);
  CHECK(error_of([] { env_mpirun_world(); }, CGX_INVALID_ARGUMENT) != "", "rank 4 of 4");
  setenv("OMPI_COMM_WORLD_RANK", "3", 1);
  CHECK(env_mpirun_world()->rank == 3 && env_mpirun_world()->size == 4, "rank 3 of 4");
  unsetenv("OMPI_COMM_WORLD_SIZE");
  unsetenv("OMPI_COMM_WORLD_RANK");
}

// Runs before anything else has chosen kernels.
void test_choice(const char* inherited) {
  setenv("CGX_CPU_TARGET", "abacus", 1);
  const std::string error = error_of([] { kernels(); }, CGX_INVALID_ARGUMENT);
  CHECK(contains(error, "abacus") && contains(error, "baseline"), error);
  if (inherited != nullptr) {
    setenv("CGX_CPU_TARGET", inherited, 1);
    CHECK(std::string(kernels().name) == inherited, inherited);
  } else {
    unsetenv("CGX_CPU_TARGET");
    CHECK(&kernels() == available_kernels().front(), kernels().name);
  }
  CHECK(std::string(available_kernels().back()->name) == "baseline", "the last resort");
}

// ---- 4. the codec ----

void test_codec_case(Dtype dtype, const BucketRun& run, const Rounding& rounding, Data kind,
                     const std::vector<float>& source) {
  const Unaligned input = stored(dtype, source);
  std::vector<float> values;
  for (int64_t i = 0; i < run.numel; ++i) {
    values.push_back(widened(dtype, input.data() + i * size_of(dtype)));
  }
  Unaligned expected(slow_bytes(run));
  slow_quantize(values, run, rounding, expected.data());
  const std::vector<float> decoded = slow_dequantize(expected.data(), run);

  Unaligned expected_values(run.numel * size_of(dtype));
  Unaligned expected_sum(run.numel * 4);
  const std::vector<float> before = make_data(Data::kNormal, run.numel, 99);
  for (int64_t i = 0; i < run.numel; ++i) {
    const float value = decoded[static_cast<size_t>(i)];
    CHECK(!std::isnan(value) || std::bit_cast<uint32_t>(value) == kFloat32Nan,
          join("decoded to another NaN, data ", static_cast<int>(kind)));
    store(dtype, value, expected_values.data() + i * size_of(dtype));
    const float sum = before[static_cast<size_t>(i)] + value;
    store(Dtype::kFloat32, std::isnan(sum) ? std::bit_cast<float>(kFloat32Nan) : sum,
          expected_sum.data() + i * 4);
  }
  for (const Kernels* target : available_kernels()) {
    const std::string where = describe(*target, dtype, run, rounding, kind);
    Unaligned records(slow_bytes(run));
    target->quantize(dtype, input.data(), run, rounding, records.data());
    CHECK(records == expected, where);
    Unaligned out(run.numel * size_of(dtype));
    target->dequantize(expected.data(), run, dtype, out.data());
    CHECK(out == expected_values, where);
    Unaligned sum = stored(Dtype::kFloat32, before);
    auto* in_place = reinterpret_cast<float*>(sum.data());
    target->dequantize_add(expected.data(), run, in_place, in_place);
    CHECK(sum == expected_sum, where);
    const Unaligned base = stored(Dtype::kFloat32, before);
    Unaligned apart(run.numel * 4);
    target->dequantize_add(expected.data(), run, reinterpret_cast<const float*>(base.data()),
                           reinterpret_cast<float*>(apart.data()));
    CHECK(apart == expected_sum, where);
  }
}

void test_codec() {
  constexpr int64_t kBuckets[] = {1, 7, 64, 512, 1000};
  constexpr int64_t kSizes[] = {0, 1, 15, 16, 17, 511, 512, 513, 100003};
  constexpr int kKinds = static_cast<int>(Data::kEnd);
  int turn = 0;
  for (const int64_t numel : kSizes) {
    std::vector<std::vector<float>> data;
    for (int kind = 0; kind < kKinds; ++kind) {
      data.push_back(make_data(static_cast<Data>(kind), numel, static_cast<uint32_t>(kind)));
    }
    for (int bits = 1; bits <= 8; ++bits) {
      for (const Dtype dtype : kDtypes) {
        for (const RoundingMode mode : kModes) {
          for (const int64_t bucket_size : kBuckets) {
            // The largest size takes the kinds of data in turn, the others take all.
            const bool large = numel > 1000;
            for (int k = 0; k < (large ? 1 : kKinds); ++k, ++turn) {
              const int kind = large ? turn % kKinds : k;
              const int64_t first = turn % 3 == 0 ? 0 : turn % 3 == 1 ? 3 : int64_t{1} << 37;
              const BucketRun run{.numel = numel,
                                  .first_index = first * bucket_size,
                                  .bucket_size = bucket_size,
                                  .bits = bits};
              const Rounding rounding{.mode = mode,
                                      .seed = 0x9876543210fedcba + static_cast<uint64_t>(turn),
                                      .rank = static_cast<uint32_t>(turn % 5),
                                      .phase = static_cast<uint32_t>(turn % 2)};
              test_codec_case(dtype, run, rounding, static_cast<Data>(kind),
                              data[static_cast<size_t>(kind)]);
            }
          }
        }
      }
    }
  }
  // A bucket larger than the caches' share of it, and one larger than the run.
  for (const int64_t bucket_size : {300000, 10000000}) {
    const std::vector<float> values = make_data(Data::kNormal, 300001, 5);
    const BucketRun run{.numel = 300001, .bucket_size = bucket_size, .bits = 5};
    test_codec_case(Dtype::kFloat32, run, {.mode = RoundingMode::kStochastic, .seed = 3},
                    Data::kNormal, values);
  }
}

#if defined(__x86_64__)
// A caller that flushes denormals and rounds towards zero, as XLA's threads do the former.
void test_float_mode() {
  constexpr uint32_t kFlush = 0x8040;
  constexpr uint32_t kTowardsZero = 0x6000;
  const std::vector<float> values = make_data(Data::kDenormal, 5000, 1);
  const BucketRun run{.numel = 5000, .bucket_size = 512, .bits = 4};
  const Unaligned input = stored(Dtype::kFloat32, values);
  Unaligned expected(slow_bytes(run));
  slow_quantize(values, run, {}, expected.data());
  const uint32_t before = _mm_getcsr();
  for (const Kernels* target : available_kernels()) {
    Unaligned unguarded(slow_bytes(run));
    Unaligned guarded(slow_bytes(run));
    _mm_setcsr(before | kFlush | kTowardsZero);
    target->quantize(Dtype::kFloat32, input.data(), run, {}, unguarded.data());
    const uint32_t outside = _mm_getcsr();
    {
      FloatMode mode;
      target->quantize(Dtype::kFloat32, input.data(), run, {}, guarded.data());
    }
    const uint32_t after = _mm_getcsr();
    _mm_setcsr(before);
    CHECK(guarded == expected, target->name);
    CHECK(!(unguarded == expected), "the test's mode should have changed the result");
    CHECK(after == outside, "the caller's mode, its exception flags included");
  }
}
#endif

// ---- 5. exact kernels ----

float one_nan(float x) { return std::isnan(x) ? std::bit_cast<float>(kFloat32Nan) : x; }

float plain(Op op, float into, float value) {
  switch (op) {
    case Op::kSum:
    case Op::kAvg:
      return one_nan(into + value);
    case Op::kProduct:
      return one_nan(into * value);
    case Op::kMin:
    case Op::kMax:
      if (std::isnan(into) || std::isnan(value)) return std::bit_cast<float>(kFloat32Nan);
      return below(into, value) == (op == Op::kMin) ? into : value;
  }
  return 0;
}

void test_exact() {
  for (const int64_t numel : {0, 1, 15, 16, 17, 513, 10007}) {
    for (int kind = 0; kind < static_cast<int>(Data::kEnd); ++kind) {
      const std::vector<float> a = make_data(static_cast<Data>(kind), numel, 11);
      std::vector<float> b = make_data(static_cast<Data>(kind), numel, 12);
      if (kind == static_cast<int>(Data::kZeros)) std::reverse(b.begin(), b.end());
      const auto expect = [&](const auto& function) {
        Unaligned out(numel * 4);
        for (int64_t i = 0; i < numel; ++i) {
          const auto at = static_cast<size_t>(i);
          store(Dtype::kFloat32, function(a[at], b[at]), out.data() + 4 * i);
        }
        return out;
      };
      for (const Kernels* target : available_kernels()) {
        const std::string where = join(target->name, " numel ", numel, " data ", kind);
        const Unaligned values = stored(Dtype::kFloat32, b);
        const auto* from = reinterpret_cast<const float*>(values.data());
        for (const Op op : {Op::kSum, Op::kAvg, Op::kMin, Op::kMax, Op::kProduct}) {
          Unaligned into = stored(Dtype::kFloat32, a);
          target->combine(op, from, reinterpret_cast<float*>(into.data()), numel);
          CHECK(into == expect([op](float x, float y) { return plain(op, x, y); }),
                join(where, " op ", static_cast<int>(op)));
        }
        Unaligned divided = stored(Dtype::kFloat32, a);
        target->divide(reinterpret_cast<float*>(divided.data()), 3.0f, numel);
        CHECK(divided == expect([](float x, float) { return one_nan(x / 3.0f); }), where);

        for (const Dtype from_type : kDtypes) {
          const Unaligned source = stored(from_type, b);
          const auto value_at = [&](int64_t i) {
            return widened(from_type, source.data() + i * size_of(from_type));
          };
          Unaligned sum = stored(Dtype::kFloat32, a);
          auto* in_place = reinterpret_cast<float*>(sum.data());
          target->add(from_type, source.data(), in_place, in_place, numel);
          Unaligned expected_sum(numel * 4);
          for (int64_t i = 0; i < numel; ++i) {
            store(Dtype::kFloat32, one_nan(a[static_cast<size_t>(i)] + value_at(i)),
                  expected_sum.data() + 4 * i);
          }
          CHECK(sum == expected_sum, where);
          for (const Dtype to_type : kDtypes) {
            Unaligned expected(numel * size_of(to_type));
            for (int64_t i = 0; i < numel; ++i) {
              store(to_type, value_at(i), expected.data() + i * size_of(to_type));
            }
            if (from_type == to_type) expected = source;  // a copy keeps every bit, NaNs' too
            Unaligned out(numel * size_of(to_type));
            target->convert(from_type, source.data(), to_type, out.data(), numel);
            CHECK(out == expected, join(where, " to ", static_cast<int>(to_type)));
          }
        }
      }
    }
  }
}

// ---- 6. codecs ----

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

  for (const Dtype wire : kDtypes) {
    for (const int bits : {1, 3, 4, 8, kExactBits}) {
      for (const bool skip : {false, true}) {
        for (const int64_t numel : {0, 1, 511, 512, 1030, 5000}) {
          const std::string where =
              join("bits ", bits, " skip ", skip, " numel ", numel, " wire ", int(wire));
          const auto made = make_codec(
              {.dtype = wire, .bits = bits, .bucket_size = 512, .skip_incomplete_buckets = skip});
          const SlicedCodec* codec = made->sliced();
          CHECK(codec, where);
          CHECK(codec->grain() == (bits == kExactBits ? 1 : 512), where);
          const int64_t records = numel / 512 * (8 + 64 * bits);
          const int64_t last = numel % 512;
          const int64_t tail = last == 0 ? 0
                               : skip    ? last * size_of(wire)
                                         : 8 + (last * bits + 7) / 8;
          const int64_t bytes = bits == kExactBits ? numel * size_of(wire) : records + tail;
          CHECK(codec->max_bytes(numel) == bytes, where);

          // Values of the wire's type, encoded as they are and widened: the same bytes.
          const Unaligned values = stored(wire, make_data(Data::kNormal, numel, 4));
          Unaligned wide(numel * 4);
          kernels().convert(wire, values.data(), Dtype::kFloat32, wide.data(), numel);
          const Rounding rounding{
              .mode = RoundingMode::kStochastic, .seed = 5, .rank = 2, .phase = 1};
          Unaligned message(bytes);
          Unaligned message_of_wide(bytes);
          CHECK(codec->encode(wire, values.data(), numel, 0, rounding, message.data()) == bytes,
                where);
          codec->encode(Dtype::kFloat32, wide.data(), numel, 0, rounding, message_of_wide.data());
          CHECK(message == message_of_wide && message.guard_intact(), where);

          Unaligned decoded(numel * 4);
          codec->decode({message.data(), static_cast<size_t>(bytes)}, numel, Dtype::kFloat32,
                        decoded.data());
          CHECK(decoded.guard_intact(), where);
          const int64_t exact_from = bits == kExactBits ? 0 : skip ? numel - last : numel;
          CHECK(std::memcmp(decoded.data() + 4 * exact_from, wide.data() + 4 * exact_from,
                            static_cast<size_t>(4 * (numel - exact_from))) == 0,
                where);
          Unaligned sum(numel * 4);
          std::memset(sum.data(), 0, static_cast<size_t>(numel * 4));
          auto* in_place = reinterpret_cast<float*>(sum.data());
          codec->decode_add({message.data(), static_cast<size_t>(bytes)}, numel, in_place,
                            in_place);
          CHECK(sum == decoded, where);

          // A piece that begins at a grain encodes to its part of the message.
          if (numel > 1024) {
            const int64_t start = codec->grain() * (bits == kExactBits ? 700 : 1);
            Unaligned piece(codec->max_bytes(numel - start));
            codec->encode(wire, values.data() + start * size_of(wire), numel - start, start,
                          rounding, piece.data());
            CHECK(std::memcmp(piece.data(), message.data() + codec->offset(start),
                              static_cast<size_t>(codec->max_bytes(numel - start))) == 0,
                  where);
          }
          const auto wrong = [&] {
            codec->decode({message.data(), static_cast<size_t>(bytes + 1)}, numel, Dtype::kFloat32,
                          decoded.data());
          };
          CHECK(contains(error_of(wrong, CGX_INVALID_ARGUMENT), join("expected ", bytes)), where);
        }
      }
    }
  }
}

}  // namespace
}  // namespace cgx

int main() {
  const char* inherited = std::getenv("CGX_CPU_TARGET");
  const std::string target = inherited != nullptr ? inherited : "";
  cgx::test_choice(inherited != nullptr ? target.c_str() : nullptr);
  cgx::test_env();
  cgx::test_philox();
  cgx::test_half();
  cgx::test_codec();
#if defined(__x86_64__)
  cgx::test_float_mode();
#endif
  cgx::test_exact();
  cgx::test_codecs();
  std::string names;
  for (const cgx::Kernels* kernels : cgx::available_kernels())
    names += std::string(" ") + kernels->name;
  if (cgx::failed > 0) std::fprintf(stderr, "%ld checks failed\n", static_cast<long>(cgx::failed));
  std::printf("%ld checks passed on%s\n", static_cast<long>(cgx::passed), names.c_str());
  return cgx::failed == 0 ? 0 : 1;
}
