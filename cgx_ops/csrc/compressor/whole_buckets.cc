// A message contains the full buckets, encoded by `inner`, then the remaining values, uncompressed.
#include <utility>

#include "compressor/wrappers.h"

namespace cgx {
namespace {

class WholeBuckets final : public FixedLengthCodec {
 public:
  WholeBuckets(std::unique_ptr<Codec> inner, std::unique_ptr<Codec> none, int64_t bucket_size)
      : inner_(std::move(inner)), none_(std::move(none)), bucket_size_(bucket_size) {}

  int64_t grain() const override { return inner_->grain(); }

  int64_t offset(int64_t first) const override {
    const int64_t whole = whole_of(first);
    return inner_->max_bytes(whole) + none_->max_bytes(first - whole);
  }

  int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t first_index,
                 const Rounding& rounding, std::byte* bytes) const override {
    const int64_t whole = whole_of(numel);
    const int64_t end = inner_->encode(dtype, values, whole, first_index, rounding, bytes);
    const auto* rest = static_cast<const std::byte*>(values) + whole * size_of(dtype);
    return end +
           none_->encode(dtype, rest, numel - whole, first_index + whole, rounding, bytes + end);
  }

  int64_t encode_keeping(const float* values, int64_t numel, int64_t first_index,
                         const Rounding& rounding, std::byte* bytes, float* errors) const override {
    const int64_t whole = whole_of(numel);
    const int64_t end = inner_->encode_keeping(values, whole, first_index, rounding, bytes, errors);
    return end + none_->encode_keeping(values + whole, numel - whole, first_index + whole, rounding,
                                       bytes + end, errors + whole);
  }

  void decode(std::span<const std::byte> bytes, int64_t numel, int64_t first_index, Dtype dtype,
              void* values) const override {
    const int64_t whole = whole_of(numel);
    const auto [head, tail] = split(bytes, numel);
    inner_->decode(head, whole, first_index, dtype, values);
    none_->decode(tail, numel - whole, first_index + whole, dtype,
                  static_cast<std::byte*>(values) + whole * size_of(dtype));
  }

  void decode_add(std::span<const std::byte> bytes, int64_t numel, int64_t first_index,
                  const float* base, float* sum) const override {
    const int64_t whole = whole_of(numel);
    const auto [head, tail] = split(bytes, numel);
    inner_->decode_add(head, whole, first_index, base, sum);
    none_->decode_add(tail, numel - whole, first_index + whole, base + whole, sum + whole);
  }

 private:
  int64_t whole_of(int64_t numel) const { return numel - numel % bucket_size_; }

  std::pair<std::span<const std::byte>, std::span<const std::byte>> split(
      std::span<const std::byte> bytes, int64_t numel) const {
    check_length(bytes, numel);
    const int64_t head = inner_->max_bytes(whole_of(numel));
    return {bytes.first(head), bytes.subspan(head)};
  }

  const std::unique_ptr<Codec> inner_, none_;
  const int64_t bucket_size_;
};

}  // namespace

std::unique_ptr<Codec> make_whole_buckets(std::unique_ptr<Codec> inner, std::unique_ptr<Codec> none,
                                          int64_t bucket_size) {
  return std::make_unique<WholeBuckets>(std::move(inner), std::move(none), bucket_size);
}

}  // namespace cgx
