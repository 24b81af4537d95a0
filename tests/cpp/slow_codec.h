// A simple, slow codec after docs/reference/wire_format.md, written independently of the kernels.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/half.h"
#include "base/philox.h"
#include "kernel/kernels.h"

namespace cgx::test {

inline int64_t slow_bytes(const BucketRun& run) {
  int64_t bytes = 0;
  for (int64_t start = 0; start < run.numel; start += run.bucket_size) {
    bytes += 8 + (std::min(run.bucket_size, run.numel - start) * run.bits + 7) / 8;
  }
  return bytes;
}

inline uint64_t multiply_words(uint64_t a, uint32_t b) {
  return uint64_t{static_cast<uint32_t>(a)} * b;
}

inline float slow_noise(int64_t index, const Rounding& rounding) {
  const auto group = static_cast<uint64_t>(index) / 128;
  const auto e = static_cast<uint64_t>(index) % 128;
  const uint64_t counter = 16 * group + e % 16;
  uint64_t words[4] = {counter & 0xffffffff, counter >> 32, rounding.rank, rounding.phase};
  philox4x32_7(words, PhiloxKeys(rounding.seed), multiply_words);
  const uint64_t u = (words[e / 32] >> (e / 16 % 2 * 16)) & 0xffff;
  return static_cast<float>((static_cast<double>(u) + 0.5) / 65536);
}

inline bool below(float a, float b) {  // -0 < +0
  return a < b || (a == b && std::signbit(a) && !std::signbit(b));
}

inline void slow_quantize(const std::vector<float>& values, const BucketRun& run,
                          const Rounding& rounding, std::byte* records) {
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

inline std::vector<float> slow_dequantize(const std::byte* records, const BucketRun& run) {
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

}  // namespace cgx::test
