// A message is the records of the whole buckets, then the last bucket if it is short: as a record
// too, or with skip_incomplete_buckets as raw values of the settings' dtype.
#include "compressor/uniform.h"

#include "base/status.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

constexpr int64_t kHeaderBytes = 8;

// Of `numel` values: those in records. The rest travels raw.
int64_t encoded_numel(const CodecSettings& settings, int64_t numel) {
  return settings.skip_incomplete_buckets ? numel - numel % settings.bucket_size : numel;
}

class Uniform final : public SlicedCodec {
 public:
  explicit Uniform(const CodecSettings& settings) : settings_(settings) {}

  int64_t grain() const override { return settings_.bucket_size; }

  int64_t offset(int64_t first) const override {
    const int64_t encoded = encoded_numel(settings_, first);
    return record_bytes(encoded) + (first - encoded) * size_of(settings_.dtype);
  }

  int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t first_index,
                 const Rounding& rounding, std::byte* bytes) const override {
    const int64_t encoded = encoded_numel(settings_, numel);
    kernels().quantize(dtype, values, run(encoded, first_index), rounding, bytes);
    if (encoded < numel) {
      const auto* tail = static_cast<const std::byte*>(values) + encoded * size_of(dtype);
      kernels().convert(dtype, tail, settings_.dtype, bytes + record_bytes(encoded),
                        numel - encoded);
    }
    return offset(numel);
  }

  int64_t encode_keeping(const float* values, int64_t numel, int64_t first_index,
                         const Rounding& rounding, std::byte* bytes, float* lost) const override {
    if (encoded_numel(settings_, numel) < numel)
      return Codec::encode_keeping(values, numel, first_index, rounding, bytes, lost);
    kernels().quantize_keeping(values, run(numel, first_index), rounding, bytes, lost);
    return offset(numel);
  }

  void decode(std::span<const std::byte> bytes, int64_t numel, Dtype dtype,
              void* values) const override {
    check_length(bytes.size(), numel);
    const int64_t encoded = encoded_numel(settings_, numel);
    kernels().dequantize(bytes.data(), run(encoded, 0), dtype, values);
    if (encoded < numel) {
      kernels().convert(settings_.dtype, bytes.data() + record_bytes(encoded), dtype,
                        static_cast<std::byte*>(values) + encoded * size_of(dtype),
                        numel - encoded);
    }
  }

  void decode_add(std::span<const std::byte> bytes, int64_t numel, const float* base,
                  float* sum) const override {
    check_length(bytes.size(), numel);
    const int64_t encoded = encoded_numel(settings_, numel);
    kernels().dequantize_add(bytes.data(), run(encoded, 0), base, sum);
    if (encoded < numel) {
      kernels().add(settings_.dtype, bytes.data() + record_bytes(encoded), base + encoded,
                    sum + encoded, numel - encoded);
    }
  }

 private:
  int64_t record_bytes(int64_t numel) const {
    const int64_t whole = numel / settings_.bucket_size;
    const int64_t last = numel % settings_.bucket_size;
    // A bucket may be far longer than any message: its own bytes only count where there is one.
    return (whole > 0 ? whole * (kHeaderBytes + field_bytes(settings_.bucket_size)) : 0) +
           (last > 0 ? kHeaderBytes + field_bytes(last) : 0);
  }

  // ceil(numel * bits / 8), which cannot overflow before the result does.
  int64_t field_bytes(int64_t numel) const {
    return numel / 8 * settings_.bits + (numel % 8 * settings_.bits + 7) / 8;
  }

  BucketRun run(int64_t numel, int64_t first_index) const {
    return {.numel = numel,
            .first_index = first_index,
            .bucket_size = settings_.bucket_size,
            .bits = settings_.bits};
  }

  void check_length(size_t bytes, int64_t numel) const {
    require(static_cast<int64_t>(bytes) == offset(numel), CGX_INVALID_ARGUMENT, bytes,
            " bytes for ", numel, " values of ", settings_.bits, " bits in buckets of ",
            settings_.bucket_size, ": expected ", offset(numel));
  }

  const CodecSettings settings_;
};

}  // namespace

std::unique_ptr<Codec> make_uniform(const CodecSettings& settings) {
  return std::make_unique<Uniform>(settings);
}

std::vector<DeviceRun> uniform_runs(const CodecSettings& settings, int64_t numel) {
  const int64_t encoded = encoded_numel(settings, numel);
  std::vector<DeviceRun> runs;
  if (encoded > 0) runs.push_back({0, encoded, settings.bits});
  if (encoded < numel) runs.push_back({encoded, numel - encoded, kExactBits});
  return runs;
}

}  // namespace cgx
