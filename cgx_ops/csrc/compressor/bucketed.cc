// A message contains the records of all buckets, contiguously. The last bucket may be short.
#include "compressor/bucketed.h"

#include "compressor/blocks.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

class Bucketed final : public FixedLengthCodec {
 public:
  Bucketed(const CodecSettings& settings, BucketFormat format, int bits)
      : bucket_size_(settings.bucket_size), format_(format), bits_(bits), clip_(settings.clip) {}

  int64_t grain() const override { return bucket_size_; }

  int64_t offset(int64_t first) const override {
    const int64_t whole = first / bucket_size_, last = first % bucket_size_;
    // A bucket may be far longer than any message, so do not multiply its size unless there is one.
    return (whole > 0 ? whole * record_bytes(bucket_size_) : 0) +
           (last > 0 ? record_bytes(last) : 0);
  }

  int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t first_index,
                 const Rounding& rounding, std::byte* bytes) const override {
    if (has_kernels_of(dtype)) {
      kernels().quantize(dtype, values, run(numel, first_index), rounding, bytes);
      return offset(numel);
    }
    for_blocks(numel, bucket_size_, [&](int64_t first, int64_t count, float* block) {
      const auto* from = static_cast<const std::byte*>(values) + first * size_of(dtype);
      kernels().convert(dtype, from, Dtype::kFloat32, block, count);
      kernels().quantize(Dtype::kFloat32, block, run(count, first_index + first), rounding,
                         bytes + offset(first));
    });
    return offset(numel);
  }

  int64_t encode_keeping(const float* values, int64_t numel, int64_t first_index,
                         const Rounding& rounding, std::byte* bytes, float* errors) const override {
    kernels().quantize_keeping(values, run(numel, first_index), rounding, bytes, errors);
    return offset(numel);
  }

  void decode(std::span<const std::byte> bytes, int64_t numel, int64_t first_index, Dtype dtype,
              void* values) const override {
    check_length(bytes, numel);
    if (has_kernels_of(dtype))
      return kernels().dequantize(bytes.data(), run(numel, first_index), dtype, values);
    for_blocks(numel, bucket_size_, [&](int64_t first, int64_t count, float* block) {
      kernels().dequantize(bytes.data() + offset(first), run(count, first_index + first),
                           Dtype::kFloat32, block);
      kernels().convert(Dtype::kFloat32, block, dtype,
                        static_cast<std::byte*>(values) + first * size_of(dtype), count);
    });
  }

  void decode_add(std::span<const std::byte> bytes, int64_t numel, int64_t first_index,
                  const float* base, float* sum) const override {
    check_length(bytes, numel);
    kernels().dequantize_add(bytes.data(), run(numel, first_index), base, sum);
  }

 private:
  bool has_kernels_of(Dtype dtype) const {
    return dtype == Dtype::kFloat32 || format_ == BucketFormat::kUniform;
  }

  int64_t record_bytes(int64_t numel) const {
    return header_bytes(format_) + field_bytes(format_, numel, bits_);
  }

  BucketRun run(int64_t numel, int64_t first_index) const {
    return {.numel = numel,
            .first_index = first_index,
            .bucket_size = bucket_size_,
            .bits = bits_,
            .format = format_,
            .clip = clip_};
  }

  const int64_t bucket_size_;
  const BucketFormat format_;
  const int bits_;
  const bool clip_;
};

}  // namespace

std::unique_ptr<Codec> make_bucketed(const CodecSettings& settings, BucketFormat format, int bits) {
  return std::make_unique<Bucketed>(settings, format, bits);
}

}  // namespace cgx
