#include "compressor/half.h"

#include "kernel/kernels.h"

namespace cgx {
namespace {

class Half final : public SlicedCodec {
 public:
  explicit Half(Dtype wire) : wire_(wire) {}

  int64_t grain() const override { return 1; }
  int64_t offset(int64_t first) const override { return first * size_of(wire_); }

  int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t first_index,
                 const Rounding& rounding, std::byte* bytes) const override {
    if (rounding.mode == RoundingMode::kStochastic && dtype != wire_)
      kernels().convert_noisily(dtype, values, numel, first_index, rounding, wire_, bytes);
    else
      kernels().convert(dtype, values, wire_, bytes, numel);
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
};

}  // namespace

std::unique_ptr<Codec> make_half(const CodecSettings& settings) {
  return std::make_unique<Half>(settings.dtype == Dtype::kFloat16 ? Dtype::kFloat16
                                                                  : Dtype::kBfloat16);
}

}  // namespace cgx
