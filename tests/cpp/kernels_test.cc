// The CPU kernels. (compressors_test.cc tests the codecs.)
//
//   1. texts that describe a case
//   2. selection of the kernels
//   3. min-max quantization by every target, bitwise equal to slow_codec.h
//   4. exact kernels of every target, bitwise equal to plain loops
//
// Exits with 1 if any check failed.
#include "kernel/kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/float_mode.h"
#include "buffers.h"
#include "checks.h"
#include "slow_codec.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace cgx {
namespace {

using namespace test;

// ---- 1. texts ----

constexpr RoundingMode kModes[] = {RoundingMode::kNearest, RoundingMode::kStochastic,
                                   RoundingMode::kShift};

std::string describe(const Kernels& target, Dtype dtype, const BucketRun& run,
                     const Rounding& rounding, Data kind) {
  return join(target.name, " dtype ", static_cast<int>(dtype), " bits ", run.bits, " bucket ",
              run.bucket_size, " numel ", run.numel, " first ", run.first_index, " rounding ",
              static_cast<int>(rounding.mode), " data ", static_cast<int>(kind));
}

// ---- 2. selection ----

// Runs before any other code selects kernels.
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
  CHECK(std::string(available_kernels().back()->name) == "baseline",
        "the last kernels in the list");
}

// ---- 3. min-max quantization ----

float finite_or_zero(float x) { return std::isfinite(x) ? x : 0.0f; }

// Clamps to the finite range, as residuals do.
float finite_in(Dtype type, float x) {
  const float largest = type == Dtype::kFloat16    ? 65504.0f
                        : type == Dtype::kBfloat16 ? 0x1.fep127f
                                                   : std::numeric_limits<float>::max();
  return std::clamp(finite_or_zero(x), -largest, largest);
}

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
  Unaligned expected_sum(run.numel * 4), expected_lost(run.numel * 4);
  const std::vector<float> before = make_data(Data::kNormal, run.numel, 99);
  for (int64_t i = 0; i < run.numel; ++i) {
    const float value = decoded[static_cast<size_t>(i)];
    CHECK(!std::isnan(value) || std::bit_cast<uint32_t>(value) == kFloat32Nan,
          join("decoded to a non-canonical NaN, data ", static_cast<int>(kind)));
    store(dtype, value, expected_values.data() + i * size_of(dtype));
    const float sum = before[static_cast<size_t>(i)] + value;
    store(Dtype::kFloat32, std::isnan(sum) ? std::bit_cast<float>(kFloat32Nan) : sum,
          expected_sum.data() + i * 4);
    store(Dtype::kFloat32, finite_or_zero(values[static_cast<size_t>(i)] - value),
          expected_lost.data() + i * 4);
  }
  for (const Kernels* target : available_kernels()) {
    const std::string where = describe(*target, dtype, run, rounding, kind);
    Unaligned records(slow_bytes(run));
    target->quantize(dtype, input.data(), run, rounding, records.data());
    CHECK(records == expected, where);
    if (dtype == Dtype::kFloat32) {
      Unaligned again(slow_bytes(run)), lost(run.numel * 4);
      target->quantize_keeping(reinterpret_cast<const float*>(input.data()), run, rounding,
                               again.data(), reinterpret_cast<float*>(lost.data()));
      CHECK(again == expected && lost == expected_lost, where);
    }
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
  constexpr int64_t kSizes[] = {0, 1, 15, 16, 17, 511, 512, 513, 20011};
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
            // The largest size rotates through the kinds of data; the other sizes use all of them.
            // With sanitizers all sizes rotate: each kind meets each value of each other axis.
            const bool rotates = kSanitized || numel > 1000;
            for (int k = 0; k < (rotates ? 1 : kKinds); ++k, ++turn) {
              const int kind = rotates ? turn % kKinds : k;
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
  // A bucket larger than its share of the caches, and one larger than the run.
  for (const int64_t bucket_size : {300000, 10000000}) {
    const std::vector<float> values = make_data(Data::kNormal, 300001, 5);
    const BucketRun run{.numel = 300001, .bucket_size = bucket_size, .bits = 5};
    test_codec_case(Dtype::kFloat32, run, {.mode = RoundingMode::kStochastic, .seed = 3},
                    Data::kNormal, values);
  }
}

#if defined(__x86_64__)
// The caller flushes denormals (as threads of XLA do) and rounds towards zero.
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
    CHECK(!(unguarded == expected), "the test's mode does not affect unguarded kernels");
    CHECK(after == outside, "the caller's mode or exception flags changed");
  }
}
#endif

// ---- 4. exact kernels ----

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
        Unaligned difference = stored(Dtype::kFloat32, b);  // the result overwrites the subtrahend
        target->subtract(reinterpret_cast<const float*>(stored(Dtype::kFloat32, a).data()),
                         reinterpret_cast<const float*>(difference.data()),
                         reinterpret_cast<float*>(difference.data()), numel);
        CHECK(difference == expect([](float x, float y) { return finite_or_zero(x - y); }), where);

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
          Unaligned twice(numel * 4), expected_twice(numel * 4), scaled(numel * size_of(from_type)),
              expected_scaled(numel * size_of(from_type));
          target->add_two(from_type, source.data(), source.data(),
                          reinterpret_cast<float*>(twice.data()), numel);
          target->scale(from, 3.0f, from_type, scaled.data(), numel);
          for (int64_t i = 0; i < numel; ++i) {
            store(Dtype::kFloat32, one_nan(value_at(i) + value_at(i)),
                  expected_twice.data() + 4 * i);
            store(from_type, finite_in(from_type, b[static_cast<size_t>(i)] * 3.0f),
                  expected_scaled.data() + i * size_of(from_type));
          }
          CHECK(twice == expected_twice, where);
          CHECK(scaled == expected_scaled, where);
          for (const Dtype to_type : kDtypes) {
            Unaligned expected(numel * size_of(to_type));
            for (int64_t i = 0; i < numel; ++i) {
              store(to_type, value_at(i), expected.data() + i * size_of(to_type));
            }
            if (from_type == to_type) expected = source;  // copies preserve every bit, even of NaNs
            Unaligned out(numel * size_of(to_type));
            target->convert(from_type, source.data(), to_type, out.data(), numel);
            CHECK(out == expected, join(where, " to ", static_cast<int>(to_type)));
            if (from_type != Dtype::kFloat32) continue;
            Unaligned kept(numel * size_of(to_type)), lost(numel * 4), expected_lost(numel * 4);
            for (int64_t i = 0; i < numel; ++i) {
              store(to_type, value_at(i), expected.data() + i * size_of(to_type));
              const float decoded = widened(to_type, expected.data() + i * size_of(to_type));
              store(Dtype::kFloat32, finite_or_zero(value_at(i) - decoded),
                    expected_lost.data() + 4 * i);
            }
            target->convert_keeping(from, to_type, kept.data(),
                                    reinterpret_cast<float*>(lost.data()), numel);
            CHECK(kept == expected && lost == expected_lost,
                  join(where, " with residual, to ", static_cast<int>(to_type)));
          }
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
  cgx::test_codec();
#if defined(__x86_64__)
  cgx::test_float_mode();
#endif
  cgx::test_exact();
  std::string names;
  for (const cgx::Kernels* kernels : cgx::available_kernels())
    names += std::string(" ") + kernels->name;
  return cgx::test::report(" on" + names);
}
