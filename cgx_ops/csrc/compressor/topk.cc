// Top-k (Aji and Heafield, EMNLP 2017): a record contains the indices of a bucket's largest
// magnitudes, then their values.
#include <algorithm>

#include "base/status.h"
#include "compressor/indices.h"
#include "compressor/sparse.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

class Topk final : public FixedLengthCodec {
 public:
  explicit Topk(const CodecSettings& settings) : settings_(settings), chosen_values_(settings) {
    require(settings.bucket_size < kMostIndices, CGX_INVALID_ARGUMENT, "buckets of ",
            settings.bucket_size, " values: topk supports fewer than 2^32");
  }

  int64_t grain() const override { return settings_.bucket_size; }

  int64_t offset(int64_t first) const override {
    const int64_t whole = first / grain(), last = first % grain();
    return (whole > 0 ? whole * record_bytes(grain()) : 0) + (last > 0 ? record_bytes(last) : 0);
  }

  int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t /*first_index*/,
                 const Rounding& /*rounding*/, std::byte* bytes) const override {
    for_buckets(numel, [&](int64_t first, int64_t count, Chosen& chosen) {
      const auto* from = static_cast<const std::byte*>(values) + first * size_of(dtype);
      encode_bucket(as_floats(dtype, from, count), count, chosen, bytes + offset(first));
    });
    return offset(numel);
  }

  int64_t encode_keeping(const float* values, int64_t numel, int64_t /*first_index*/,
                         const Rounding& /*rounding*/, std::byte* bytes,
                         float* errors) const override {
    for_buckets(numel, [&](int64_t first, int64_t count, Chosen& chosen) {
      const auto sent = encode_bucket(values + first, count, chosen, bytes + offset(first));
      chosen_values_.decode(sent, static_cast<int64_t>(chosen.values.size()), chosen.values.data());
      chosen.subtract_from(count, values + first, errors + first);
    });
    return offset(numel);
  }

  void decode(std::span<const std::byte> bytes, int64_t numel, int64_t /*first_index*/, Dtype dtype,
              void* values) const override {
    for_records(bytes, numel, [&](int64_t first, int64_t count, const Chosen& chosen) {
      chosen.scatter(count, dtype, static_cast<std::byte*>(values) + first * size_of(dtype));
    });
  }

  void decode_add(std::span<const std::byte> bytes, int64_t numel, int64_t /*first_index*/,
                  const float* base, float* sum) const override {
    for_records(bytes, numel, [&](int64_t first, int64_t count, const Chosen& chosen) {
      chosen.add(count, base + first, sum + first);
    });
  }

 private:
  int64_t record_bytes(int64_t numel) const {
    const int64_t k = share_of(settings_, numel);
    return indices_bytes(numel, k) + chosen_values_.bytes(k);
  }

  // Returns the bytes of the values.
  std::span<const std::byte> encode_bucket(const float* values, int64_t numel, Chosen& chosen,
                                           std::byte* bytes) const {
    const auto k = static_cast<int64_t>(chosen.indices.size());
    kernels().select_largest(values, numel, k, chosen.indices.data());
    chosen.gather(values);
    write_indices(chosen.indices, numel, bytes);
    std::byte* const values_at = bytes + indices_bytes(numel, k);
    chosen_values_.encode(chosen.values.data(), k, values_at);
    return {values_at, static_cast<size_t>(chosen_values_.bytes(k))};
  }

  // Calls work(first, count, chosen), where `chosen` has room for the bucket's share.
  template <typename Work>
  void for_buckets(int64_t numel, const Work& work) const {
    thread_local Chosen chosen;
    for (int64_t first = 0; first < numel; first += grain()) {
      const int64_t count = std::min(grain(), numel - first);
      chosen.resize(share_of(settings_, count));
      work(first, count, chosen);
    }
  }

  template <typename Work>
  void for_records(std::span<const std::byte> bytes, int64_t numel, const Work& work) const {
    check_length(bytes, numel);
    for_buckets(numel, [&](int64_t first, int64_t count, Chosen& chosen) {
      const auto k = static_cast<int64_t>(chosen.indices.size());
      const int64_t at = offset(first), value_at = at + indices_bytes(count, k);
      read_indices(bytes.data() + at, count, chosen.indices);
      chosen_values_.decode(bytes.subspan(value_at, chosen_values_.bytes(k)), k,
                            chosen.values.data());
      work(first, count, chosen);
    });
  }

  const CodecSettings settings_;
  const ChosenValues chosen_values_;
};

}  // namespace

std::unique_ptr<Codec> make_topk(const CodecSettings& settings) {
  return std::make_unique<Topk>(settings);
}

}  // namespace cgx
