// Test values for codecs: normal ones, and special cases of floating-point arithmetic.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace cgx::test {

// kLowest: values near the limits, whose shifted grid may begin or end outside the finite range.
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

inline float value_of(Data kind, std::mt19937& random, std::normal_distribution<float>& normal) {
  switch (kind) {
    case Data::kNormal:
      return normal(random);
    case Data::kHugeRange: {
      const float x = normal(random);  // drawn first, since the order of arguments is unspecified
      return std::ldexp(x, static_cast<int>(random() % 254) - 127);
    }
    case Data::kNonFinite: {
      constexpr float kInf = std::numeric_limits<float>::infinity();
      constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
      constexpr float kSpecial[] = {kInf, -kInf, -0.0f, 3e38f, -3e38f, kNan, -kNan};
      const uint32_t which = random() % 2000;
      return which < 7 ? kSpecial[which] : normal(random);
    }
    case Data::kLowest:
      return random() % 8 ? -std::fmin(std::fabs(normal(random)), 3.0f) * 1e38f
                          : -std::numeric_limits<float>::max();
    case Data::kDenormal:
      return normal(random) * 1e-39f;
    case Data::kZeros:
      return random() % 2 ? 0.0f : -0.0f;
    case Data::kConstant:
      return 3.3f;
    case Data::kAnyBits:
    case Data::kEnd:
      break;
  }
  return std::bit_cast<float>(static_cast<uint32_t>(random()));
}

}  // namespace cgx::test
