// Tests base/: half types, noise and environment, without ranks. Exits with 1 if any check failed.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>

#include "base/bytes.h"
#include "base/env.h"
#include "base/half.h"
#include "base/philox.h"
#include "base/status.h"
#include "checks.h"

namespace cgx {
namespace {

using test::contains;
using test::error_of;

uint64_t multiply_words(uint64_t a, uint32_t b) { return uint64_t{static_cast<uint32_t>(a)} * b; }

void test_cut() {
  struct Case {
    const char* text;
    size_t most;
    const char* whole;
  };
  const Case cases[] = {
      {"", 0, ""},    {"abc", 3, "abc"},       {"abc", 2, "ab"},
      {"é", 1, ""},   {"aéb", 2, "a"},         {"aéb", 3, "aé"},
      {"€€", 5, "€"}, {"a\U0001f600", 4, "a"}, {"\x80\x80", 1, ""},
  };
  for (const Case& each : cases) {
    CHECK(cut(each.text, each.most) == each.whole, join(each.text, " cut to ", each.most));
    char field[4];
    put_text(field, each.text);
    CHECK(text_of(field) == cut(each.text, 3), each.text);
  }
}

void test_philox() {
  // Known answers for seven rounds, from the authors of Philox.
  struct Answer {
    uint64_t counter[4];
    uint64_t seed;
    uint32_t noise[4];
  };
  constexpr uint64_t kOnes = 0xffffffff;
  const Answer answers[] = {
      {{0, 0, 0, 0}, 0, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
      {{kOnes, kOnes, kOnes, kOnes},
       ~uint64_t{0},
       {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       0x299f31d0a4093822,
       {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
  };
  for (const Answer& answer : answers) {
    uint64_t words[4];
    std::copy_n(answer.counter, 4, words);
    philox4x32_7(words, PhiloxKeys(answer.seed), multiply_words);
    for (int i = 0; i < 4; ++i) {
      CHECK(static_cast<uint32_t>(words[i]) == answer.noise[i], join("word ", i));
    }
  }
}

// Rounds x to the nearest value of a 16-bit format, ties to even, by comparison with both
// neighbours. `floor_bits` is the representable value next to x towards zero.
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
    // Exponents near those of fp16. The last bit and the tie are often hit exactly.
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
    // Truncation to fp16, independently of the code under test.
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
  CHECK(contains(error, name) && contains(error, "UCC") &&
            contains(error, "AUTO, SHM, MPI, TCP, NCCL"),
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

}  // namespace
}  // namespace cgx

int main() {
  cgx::test_env();
  cgx::test_cut();
  cgx::test_philox();
  cgx::test_half();
  return cgx::test::report();
}
