// A codec for tests whose length depends on the values: the number of values of at least 0.5 in
// magnitude, then their indices and values. Once added, bits=3 selects it.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "base/status.h"
#include "compressor/codec.h"
#include "kernel/kernels.h"

namespace cgx {

inline constexpr int kPairsBits = 3;
inline constexpr int64_t kPairsGrain = 1000;

struct Pair {
  uint32_t index;
  float value;
};

class Pairs final : public Codec {
 public:
  int64_t grain() const override { return kPairsGrain; }
  int64_t max_bytes(int64_t numel) const override {
    const int64_t grains = (numel + kPairsGrain - 1) / kPairsGrain;
    return grains * sizeof(uint32_t) + numel * sizeof(Pair);
  }

  int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t /*first_index*/,
                 const Rounding& /*rounding*/, std::byte* bytes) const override {
    require(numel >= 1 && numel <= kPairsGrain, CGX_INTERNAL, numel, " values in one grain");
    std::vector<float> wide(numel);
    kernels().convert(dtype, values, Dtype::kFloat32, wide.data(), numel);
    uint32_t count = 0;
    int64_t end = sizeof(count);
    for (int64_t i = 0; i < numel; ++i) {
      if (!(std::abs(wide[i]) >= 0.5f)) continue;
      const Pair pair{static_cast<uint32_t>(i), wide[i]};
      std::memcpy(bytes + end, &pair, sizeof(pair));
      end += sizeof(pair);
      ++count;
    }
    std::memcpy(bytes, &count, sizeof(count));
    return end;
  }

  void decode(std::span<const std::byte> bytes, int64_t numel, int64_t first_index, Dtype dtype,
              void* values) const override {
    std::vector<float> wide(numel, 0.0f);
    decode_add(bytes, numel, first_index, wide.data(), wide.data());
    kernels().convert(Dtype::kFloat32, wide.data(), dtype, values, numel);
  }

  void decode_add(std::span<const std::byte> bytes, int64_t numel, int64_t /*first_index*/,
                  const float* base, float* sum) const override {
    uint32_t count = 0;
    if (bytes.size() >= sizeof(count)) std::memcpy(&count, bytes.data(), sizeof(count));
    require(bytes.size() == sizeof(count) + count * sizeof(Pair), CGX_INVALID_ARGUMENT,
            bytes.size(), " bytes for ", count, " pairs");
    if (base != sum) std::memcpy(sum, base, numel * sizeof(float));
    int64_t next = 0;
    for (size_t at = sizeof(count); at < bytes.size(); at += sizeof(Pair)) {
      Pair pair;
      std::memcpy(&pair, bytes.data() + at, sizeof(pair));
      require(pair.index >= next && pair.index < numel, CGX_INVALID_ARGUMENT, "index ", pair.index,
              " of a pair is not from ", next, " to ", numel - 1);
      next = int64_t{pair.index} + 1;
      sum[pair.index] += pair.value;
    }
  }
};

inline void add_pairs_codec() {
  add_codec({.name = "pairs",
             .description = "for tests: values of at least a half, with their indices",
             .fixed_length = false,
             .serves = [](const CodecSettings& settings) { return settings.bits == kPairsBits; },
             .make = [](const CodecSettings&) -> std::unique_ptr<Codec> {
               return std::make_unique<Pairs>();
             },
             .why_not = "it is for tests"});
}

}  // namespace cgx
