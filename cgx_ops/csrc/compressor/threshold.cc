// The threshold of Deep Gradient Compression (Lin et al., ICLR 2018): that of a sample's largest
// magnitudes, adapted until about the desired number of values is above it. A message contains
// their number, indices and values.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/status.h"
#include "compressor/indices.h"
#include "compressor/sparse.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

constexpr int64_t kSampleEvery = 100;  // values
constexpr int kMostRounds = 10;
// The accepted number of chosen values, relative to the desired one. A threshold is multiplied by
// the same factors.
constexpr double kMost = 1.3, kLeast = 0.8;
constexpr int64_t kCountBytes = 8;

// Finds a threshold that between `least` and `most` values reach, by trials. Does not count again
// if an earlier trial implies the result, and counts only the remaining candidates if they are few.
class Search {
 public:
  Search(const float* values, int64_t numel, int64_t least, int64_t most)
      : values_(values), numel_(numel), least_(least), most_(most) {}

  enum class Above { kTooFew, kEnough, kTooMany };
  Above inspect(float threshold) {
    const auto key = std::bit_cast<int32_t>(threshold);  // magnitudes are ordered as their bits
    if (key <= too_many_to_) return Above::kTooMany;
    if (key >= too_few_from_) return Above::kTooFew;
    const int64_t count = kernels().count_from(values(), numel(), threshold);
    if (count < least_) {
      too_few_from_ = key;
      return Above::kTooFew;
    }
    if (count <= most_) return Above::kEnough;
    too_many_to_ = key;
    if (count <= kFew * most_) narrow(threshold, count);
    return Above::kTooMany;
  }

  // Returns the indices of values that reach the threshold. If that is more than `most`, those of
  // the `most` largest; if fewer than `least`, those of the `least` largest. The latter happens if
  // many values are nearly equal.
  std::vector<uint32_t> indices(float threshold) const {
    std::vector<uint32_t> indices(most_);
    int64_t found = most_ + 1;
    if (std::bit_cast<int32_t>(threshold) > too_many_to_)
      found = kernels().indices_from(values(), numel(), threshold, most_, indices.data());
    const int64_t count = std::clamp(found, least_, most_);
    if (found != count) kernels().select_largest(values(), numel(), count, indices.data());
    indices.resize(count);
    to_all(&indices);
    return indices;
  }

 private:
  // Relative to `most_`: recording a value takes as long as comparing about twenty.
  static constexpr int64_t kFew = 4;

  const float* values() const { return few_.indices.empty() ? values_ : few_.values.data(); }
  int64_t numel() const {
    return few_.indices.empty() ? numel_ : static_cast<int64_t>(few_.indices.size());
  }

  // Converts indices of candidates to indices of all values.
  void to_all(std::vector<uint32_t>* indices) const {
    if (few_.indices.empty()) return;
    for (uint32_t& index : *indices) index = few_.indices[index];
  }

  // Keeps the values that reach the threshold as candidates.
  void narrow(float threshold, int64_t count) {
    Chosen fewer;
    fewer.resize(count);
    kernels().indices_from(values(), numel(), threshold, count, fewer.indices.data());
    fewer.gather(values());
    to_all(&fewer.indices);
    few_ = std::move(fewer);
  }

  const float* const values_;
  const int64_t numel_, least_, most_;
  // Thresholds, as bits: at most this one, too many values reach it; from that one on, too few.
  int32_t too_many_to_ = -1, too_few_from_ = std::numeric_limits<int32_t>::max();
  Chosen few_;  // the candidates; empty: all values
};

class Threshold final : public Codec {
 public:
  explicit Threshold(const CodecSettings& settings)
      : settings_(settings), chosen_values_(settings) {}

  int64_t max_bytes(int64_t numel) const override {
    if (numel == 0) return 0;
    require(numel < kMostIndices, CGX_INVALID_ARGUMENT, numel,
            " values: threshold supports fewer than 2^32");
    const int64_t most = most_chosen(numel);
    // An upper bound for all counts: an index takes at most log2(numel / count) + 3 bits, plus a
    // partial byte.
    const int bits = static_cast<int>(std::log2(numel / most)) + 4;
    return kCountBytes + most * bits / 8 + 2 + chosen_values_.bytes(most);
  }

  int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t /*first_index*/,
                 const Rounding& /*rounding*/, std::byte* bytes) const override {
    Chosen chosen;
    return write(as_floats(dtype, values, numel), numel, &chosen, bytes);
  }

  int64_t encode_keeping(const float* values, int64_t numel, int64_t /*first_index*/,
                         const Rounding& /*rounding*/, std::byte* bytes,
                         float* errors) const override {
    Chosen chosen;
    const int64_t end = write(values, numel, &chosen, bytes);
    const auto count = static_cast<int64_t>(chosen.values.size());
    const int64_t length = chosen_values_.bytes(count);
    chosen_values_.decode({bytes + end - length, static_cast<size_t>(length)}, count,
                          chosen.values.data());
    chosen.subtract_from(numel, values, errors);
    return end;
  }

  void decode(std::span<const std::byte> bytes, int64_t numel, int64_t /*first_index*/, Dtype dtype,
              void* values) const override {
    if (numel > 0 || !bytes.empty()) read(bytes, numel).scatter(numel, dtype, values);
  }

  void decode_add(std::span<const std::byte> bytes, int64_t numel, int64_t /*first_index*/,
                  const float* base, float* sum) const override {
    if (numel > 0 || !bytes.empty()) read(bytes, numel).add(numel, base, sum);
  }

 private:
  int64_t most_chosen(int64_t numel) const {
    const auto most = static_cast<int64_t>(kMost * static_cast<double>(share_of(settings_, numel)));
    return std::clamp<int64_t>(most, 1, numel);
  }

  // Returns the bytes written.
  int64_t write(const float* values, int64_t numel, Chosen* chosen, std::byte* bytes) const {
    if (numel == 0) return 0;
    chosen->indices = choose(values, numel);
    const auto count = static_cast<int64_t>(chosen->indices.size());
    chosen->resize(count);
    chosen->gather(values);
    std::memcpy(bytes, &count, kCountBytes);
    write_indices(chosen->indices, numel, bytes + kCountBytes);
    const int64_t value_at = kCountBytes + indices_bytes(numel, count);
    chosen_values_.encode(chosen->values.data(), count, bytes + value_at);
    return value_at + chosen_values_.bytes(count);
  }

  std::vector<uint32_t> choose(const float* values, int64_t numel) const {
    const int64_t most = most_chosen(numel);
    const double least = kLeast * static_cast<double>(share_of(settings_, numel));
    float threshold = sampled(values, numel);
    if (std::isnan(threshold)) {  // all values reach it
      std::vector<uint32_t> indices(most);
      kernels().select_largest(values, numel, most, indices.data());
      return indices;
    }
    Search search(values, numel, static_cast<int64_t>(std::ceil(least)), most);
    for (int round = 0; round < kMostRounds; ++round) {
      const Search::Above above = search.inspect(threshold);
      if (above == Search::Above::kEnough) break;
      threshold *= static_cast<float>(above == Search::Above::kTooMany ? kMost : kLeast);
    }
    return search.indices(threshold);
  }

  // Returns the smallest of the sample's largest magnitudes.
  float sampled(const float* values, int64_t numel) const {
    std::vector<float> sample;
    for (int64_t i = std::min(kSampleEvery, numel) / 2; i < numel; i += kSampleEvery) {
      float value;
      std::memcpy(&value, values + i, sizeof(value));  // callers' values may be unaligned
      sample.push_back(value);
    }
    const auto count = static_cast<int64_t>(sample.size());
    std::vector<uint32_t> indices(share_of(settings_, count));
    kernels().select_largest(sample.data(), count, static_cast<int64_t>(indices.size()),
                             indices.data());
    float least = std::abs(sample[indices[0]]);
    for (const uint32_t index : indices) least = std::min(least, std::abs(sample[index]));
    return least;
  }

  Chosen read(std::span<const std::byte> bytes, int64_t numel) const {
    int64_t count = 0;
    const auto length = static_cast<int64_t>(bytes.size());
    if (length >= kCountBytes) std::memcpy(&count, bytes.data(), kCountBytes);
    require(count >= 1 && numel >= 1 && count <= most_chosen(numel), CGX_INVALID_ARGUMENT, count,
            " values above a threshold, of ", numel);
    const int64_t value_at = kCountBytes + indices_bytes(numel, count);
    const int64_t value_bytes = chosen_values_.bytes(count);
    require(length == value_at + value_bytes, CGX_INVALID_ARGUMENT, length, " bytes for ", count,
            " values of ", numel, ": expected ", value_at + value_bytes);
    Chosen chosen;
    chosen.resize(count);
    read_indices(bytes.data() + kCountBytes, numel, chosen.indices);
    chosen_values_.decode(bytes.subspan(value_at), count, chosen.values.data());
    return chosen;
  }

  const CodecSettings settings_;
  const ChosenValues chosen_values_;
};

}  // namespace

std::unique_ptr<Codec> make_threshold(const CodecSettings& settings) {
  return std::make_unique<Threshold>(settings);
}

}  // namespace cgx
