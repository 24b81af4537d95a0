// Sparse codecs, which send a few chosen values, and the encoding of these.
#pragma once

#include <memory>
#include <vector>

#include "compressor/codec.h"

namespace cgx {

// Sends the largest magnitudes of each bucket.
std::unique_ptr<Codec> make_topk(const CodecSettings& settings);
// Sends the values of each bucket at random indices, derived from the seed.
std::unique_ptr<Codec> make_randk(const CodecSettings& settings);

// Returns max(1, ceil(density * numel)) for numel > 0.
int64_t share_of(const CodecSettings& settings, int64_t numel);

// The limit on a segment's elements: indices have 32 bits.
inline constexpr int64_t kMostIndices = int64_t{1} << 32;

// Encodes a few contiguous values: uncompressed, in 16 bits, or as one bucket of signs and
// magnitudes.
class ChosenValues {
 public:
  explicit ChosenValues(const CodecSettings& settings);
  int64_t bytes(int64_t count) const { return codec_->max_bytes(count); }
  void encode(const float* values, int64_t count, std::byte* bytes) const;
  void decode(std::span<const std::byte> bytes, int64_t count, float* values) const;

 private:
  const std::unique_ptr<Codec> codec_;
};

// Chosen values and their indices. Valid within one call.
struct Chosen {
  std::vector<uint32_t> indices;
  std::vector<float> values;

  void resize(int64_t count);
  // values[i] = from[indices[i]]; NaN becomes the canonical NaN.
  void gather(const float* from);
  // Writes the values at their indices and 0 elsewhere. -0 becomes 0.
  void scatter(int64_t numel, Dtype dtype, void* to) const;
  // sum = base + the same.
  void add(int64_t numel, const float* base, float* sum) const;
  // errors = from - the same, or 0 if that is not finite. `errors` may be `from`. If `from` has
  // non-finite values, at least one of them must be chosen.
  void subtract_from(int64_t numel, const float* from, float* errors) const;
};

// Returns the values as fp32, converted if necessary. Valid within one call.
const float* as_floats(Dtype dtype, const void* values, int64_t numel);

}  // namespace cgx
