// What sparse codecs share: values that were chosen, as bytes; and codecs that send no others.
#pragma once

#include <memory>
#include <vector>

#include "compressor/codec.h"

namespace cgx {

// The largest magnitudes of each bucket.
std::unique_ptr<Codec> make_topk(const CodecSettings& settings);
// The magnitudes of a segment above a threshold, which a sample tells.
std::unique_ptr<Codec> make_threshold(const CodecSettings& settings);
// Values of each bucket at places that follow from the seed.
std::unique_ptr<Codec> make_randk(const CodecSettings& settings);

// max(1, ceil(density * numel)), of numel > 0.
int64_t share_of(const CodecSettings& settings, int64_t numel);

// A segment's own limit: places are numbers of 32 bits.
inline constexpr int64_t kMostPlaces = int64_t{1} << 32;

// A few values, end to end: exact, in 16 bits, or as one bucket of signs and magnitudes.
class ChosenValues {
 public:
  explicit ChosenValues(const CodecSettings& settings);
  int64_t bytes(int64_t count) const { return codec_->max_bytes(count); }
  void encode(const float* values, int64_t count, std::byte* bytes) const;
  void decode(std::span<const std::byte> bytes, int64_t count, float* values) const;

 private:
  const std::unique_ptr<Codec> codec_;
};

// Values and their places, for the time of a call.
struct Chosen {
  std::vector<uint32_t> places;
  std::vector<float> values;

  void resize(int64_t count);
  // values[i] = from[places[i]]; a NaN becomes the one that arithmetic makes.
  void gather(const float* from);
  // 0 but at the places; there is no -0.
  void scatter(int64_t numel, Dtype dtype, void* to) const;
  // sum = base + that.
  void add(int64_t numel, const float* base, float* sum) const;
  // lost = from - that, or 0 where it is not finite; `lost` may be `from`. Among the chosen is
  // something that is not finite, if `from` has such values.
  void subtract_from(int64_t numel, const float* from, float* lost) const;
};

// As fp32, where they are something else; used within one call only.
const float* as_floats(Dtype dtype, const void* values, int64_t numel);

}  // namespace cgx
