// A message is the records of the whole buckets, then the last bucket if it is short: as a record
// too, or with skip_incomplete_buckets as raw values of the settings' dtype.
#include "compressor/uniform.h"

#include "base/status.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

constexpr int64_t kHeaderBytes = 8;

class Uniform final : public Compressor {
 public:
  explicit Uniform(const CompressorSettings& settings) : settings_(settings) {}

  int64_t grain() const override { return settings_.bucket_size; }

  int64_t max_bytes(int64_t numel) const override {
    const int64_t encoded = encoded_numel(numel);
    return record_bytes(encoded) + (numel - encoded) * size_of(settings_.dtype);
  }

  int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t first_index,
                 const Rounding& rounding, std::byte* bytes) const override {
    const int64_t encoded = encoded_numel(numel);
    kernels().quantize(dtype, values, run(encoded, first_index), rounding, bytes);
    if (encoded < numel) {
      const auto* tail = static_cast<const std::byte*>(values) + encoded * size_of(dtype);
      kernels().convert(dtype, tail, settings_.dtype, bytes + record_bytes(encoded),
                        numel - encoded);
    }
    return max_bytes(numel);
  }

  void decode(const std::byte* bytes, int64_t num_bytes, int64_t numel, Dtype dtype,
              void* values) const override {
    check_length(num_bytes, numel);
    const int64_t encoded = encoded_numel(numel);
    kernels().dequantize(bytes, run(encoded, 0), dtype, values);
    if (encoded < numel) {
      kernels().convert(settings_.dtype, bytes + record_bytes(encoded), dtype,
                        static_cast<std::byte*>(values) + encoded * size_of(dtype),
                        numel - encoded);
    }
  }

  void decode_add(const std::byte* bytes, int64_t num_bytes, int64_t numel, const float* base,
                  float* sum) const override {
    check_length(num_bytes, numel);
    const int64_t encoded = encoded_numel(numel);
    kernels().dequantize_add(bytes, run(encoded, 0), base, sum);
    if (encoded < numel) {
      kernels().add(settings_.dtype, bytes + record_bytes(encoded), base + encoded, sum + encoded,
                    numel - encoded);
    }
  }

 private:
  // Values in records; the rest travels raw.
  int64_t encoded_numel(int64_t numel) const { return numel_of_whole_buckets(settings_, numel); }

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

  void check_length(int64_t num_bytes, int64_t numel) const {
    require(num_bytes == max_bytes(numel), CGX_INTERNAL, "message of ", num_bytes, " bytes for ",
            numel, " values of ", settings_.bits, " bits in buckets of ", settings_.bucket_size,
            ": expected ", max_bytes(numel));
  }

  const CompressorSettings settings_;
};

}  // namespace

std::unique_ptr<Compressor> make_uniform(const CompressorSettings& settings) {
  return std::make_unique<Uniform>(settings);
}

}  // namespace cgx
