#include "compressor/plain.h"

#include "kernel/kernels.h"

namespace cgx {
namespace {

class Plain final : public FixedLengthCodec {
 public:
  // `noisy`: whether rounding to the dtype may be stochastic.
  Plain(Dtype wire, bool noisy) : wire_(wire), noisy_(noisy) {}

  int64_t grain() const override { return 1; }
  int64_t offset(int64_t first) const override { return first * size_of(wire_); }

  int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t first_index,
                 const Rounding& rounding, std::byte* bytes) const override {
    if (noisy_ && rounding.mode == RoundingMode::kStochastic && dtype != wire_)
      kernels().convert_noisily(dtype, values, numel, first_index, rounding, wire_, bytes);
    else
      kernels().convert(dtype, values, wire_, bytes, numel);
    return offset(numel);
  }

  int64_t encode_keeping(const float* values, int64_t numel, int64_t first_index,
                         const Rounding& rounding, std::byte* bytes, float* errors) const override {
    if (noisy_ && rounding.mode == RoundingMode::kStochastic)
      return Codec::encode_keeping(values, numel, first_index, rounding, bytes, errors);
    kernels().convert_keeping(values, wire_, bytes, errors, numel);
    return offset(numel);
  }

  void decode(std::span<const std::byte> bytes, int64_t numel, int64_t /*first_index*/, Dtype dtype,
              void* values) const override {
    check_length(bytes, numel);
    kernels().convert(wire_, bytes.data(), dtype, values, numel);
  }

  void decode_add(std::span<const std::byte> bytes, int64_t numel, int64_t /*first_index*/,
                  const float* base, float* sum) const override {
    check_length(bytes, numel);
    kernels().add(wire_, bytes.data(), base, sum, numel);
  }

 private:
  const Dtype wire_;
  const bool noisy_;
};

}  // namespace

std::unique_ptr<Codec> make_none(const CodecSettings& settings) {
  return std::make_unique<Plain>(settings.dtype, /*noisy=*/false);
}

std::unique_ptr<Codec> make_half(const CodecSettings& settings) {
  const bool fp16 = settings.dtype == Dtype::kFloat16;
  return std::make_unique<Plain>(fp16 ? Dtype::kFloat16 : Dtype::kBfloat16, /*noisy=*/true);
}

}  // namespace cgx
