// Rand-k: sends the values of each bucket at random indices. These are derived from the seed, which
// all ranks share, and from the bucket's first index. Only values are sent, uncompressed. Sums of
// such values are zero elsewhere, so encoding them again is lossless. If any value of a bucket is
// not finite, all values sent for it are NaN.
//
// Indices are drawn by Floyd's method (Bentley, Programming Pearls, CACM 1987): for each j of the
// last k positions, draw an index up to j, or take j itself if that index is taken.
#include <algorithm>
#include <bit>
#include <limits>

#include "base/philox.h"
#include "base/status.h"
#include "compressor/plain.h"
#include "compressor/sparse.h"
#include "kernel/bucket_format.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

// Gathers the chosen values; NaN if any value of the bucket is not finite.
void gather(const float* from, int64_t numel, Chosen& chosen) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  chosen.gather(from);
  if (kernels().count_from(from, numel, kInfinity) > 0)
    std::fill(chosen.values.begin(), chosen.values.end(), std::numeric_limits<float>::quiet_NaN());
}

class Randk final : public FixedLengthCodec {
 public:
  explicit Randk(const CodecSettings& settings)
      : settings_(settings), none_(make_none(settings)), keys_(settings.seed) {
    require(settings.bucket_size < kMostIndices, CGX_INVALID_ARGUMENT, "buckets of ",
            settings.bucket_size, " values: randk supports fewer than 2^32");
  }

  int64_t grain() const override { return settings_.bucket_size; }

  int64_t offset(int64_t first) const override {
    const int64_t whole = first / grain(), last = first % grain();
    const int64_t count = (whole > 0 ? whole * share_of(settings_, grain()) : 0) +
                          (last > 0 ? share_of(settings_, last) : 0);
    return none_->max_bytes(count);
  }

  int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t first_index,
                 const Rounding& rounding, std::byte* bytes) const override {
    for_buckets(numel, first_index, [&](int64_t first, int64_t count, Chosen& chosen) {
      const auto* from = static_cast<const std::byte*>(values) + first * size_of(dtype);
      gather(as_floats(dtype, from, count), count, chosen);
      none_->encode(Dtype::kFloat32, chosen.values.data(),
                    static_cast<int64_t>(chosen.values.size()), 0, rounding, bytes + offset(first));
    });
    return offset(numel);
  }

  int64_t encode_keeping(const float* values, int64_t numel, int64_t first_index,
                         const Rounding& rounding, std::byte* bytes, float* errors) const override {
    for_buckets(numel, first_index, [&](int64_t first, int64_t count, Chosen& chosen) {
      const auto k = static_cast<int64_t>(chosen.indices.size());
      const auto length = static_cast<size_t>(none_->max_bytes(k));
      std::byte* const to = bytes + offset(first);
      gather(values + first, count, chosen);
      none_->encode(Dtype::kFloat32, chosen.values.data(), k, 0, rounding, to);
      none_->decode({to, length}, k, 0, Dtype::kFloat32, chosen.values.data());
      chosen.subtract_from(count, values + first, errors + first);
    });
    return offset(numel);
  }

  void decode(std::span<const std::byte> bytes, int64_t numel, int64_t first_index, Dtype dtype,
              void* values) const override {
    for_records(bytes, numel, first_index, [&](int64_t first, int64_t count, const Chosen& chosen) {
      chosen.scatter(count, dtype, static_cast<std::byte*>(values) + first * size_of(dtype));
    });
  }

  void decode_add(std::span<const std::byte> bytes, int64_t numel, int64_t first_index,
                  const float* base, float* sum) const override {
    for_records(bytes, numel, first_index, [&](int64_t first, int64_t count, const Chosen& chosen) {
      chosen.add(count, base + first, sum + first);
    });
  }

 private:
  // Calls work(first, count, chosen) with the indices of each bucket.
  template <typename Work>
  void for_buckets(int64_t numel, int64_t first_index, const Work& work) const {
    thread_local Chosen chosen;
    for (int64_t first = 0; first < numel; first += grain()) {
      const int64_t count = std::min(grain(), numel - first);
      chosen.resize(share_of(settings_, count));
      draw(static_cast<uint64_t>(first_index + first), count, chosen.indices);
      work(first, count, chosen);
    }
  }

  template <typename Work>
  void for_records(std::span<const std::byte> bytes, int64_t numel, int64_t first_index,
                   const Work& work) const {
    check_length(bytes, numel);
    for_buckets(numel, first_index, [&](int64_t first, int64_t count, Chosen& chosen) {
      const auto k = static_cast<int64_t>(chosen.indices.size());
      none_->decode(bytes.subspan(offset(first), none_->max_bytes(k)), k, 0, Dtype::kFloat32,
                    chosen.values.data());
      work(first, count, chosen);
    });
  }

  // Draws indices below `numel`, in ascending order.
  void draw(uint64_t first_index, int64_t numel, std::span<uint32_t> indices) const {
    thread_local std::vector<uint64_t> taken;  // one bit per value
    taken.assign((numel + 63) / 64, 0);
    const auto k = static_cast<int64_t>(indices.size());
    uint64_t words[4] = {};
    for (int64_t i = 0; i < k; ++i) {
      if (i % 4 == 0) {
        words[0] = static_cast<uint32_t>(first_index);
        words[1] = static_cast<uint32_t>(first_index >> 32);
        words[2] = static_cast<uint32_t>(i / 4);
        words[3] = kIndicesPhase;
        philox4x32_7(words, keys_);
      }
      const auto j = static_cast<uint64_t>(numel - k + i);
      // Uniform up to j, with a relative error of at most numel / 2^32.
      uint64_t index = uint64_t{static_cast<uint32_t>(words[i % 4])} * (j + 1) >> 32;
      if (taken[index / 64] >> (index % 64) & 1) index = j;
      taken[index / 64] |= uint64_t{1} << (index % 64);
    }
    size_t found = 0;
    for (size_t word = 0; word < taken.size(); ++word)
      for (uint64_t bits = taken[word]; bits != 0; bits &= bits - 1)
        indices[found++] = static_cast<uint32_t>(64 * word + std::countr_zero(bits));
  }

  const CodecSettings settings_;
  const std::unique_ptr<Codec> none_;
  const PhiloxKeys keys_;
};

}  // namespace

std::unique_ptr<Codec> make_randk(const CodecSettings& settings) {
  return std::make_unique<Randk>(settings);
}

}  // namespace cgx
