#include "compressor/none.h"

#include "kernel/kernels.h"

namespace cgx {
namespace {

class None final : public SlicedCodec {
 public:
  explicit None(Dtype wire) : wire_(wire) {}

  int64_t grain() const override { return 1; }
  int64_t offset(int64_t first) const override { return first * size_of(wire_); }

  int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t /*first_index*/,
                 const Rounding& /*rounding*/, std::byte* bytes) const override {
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

std::unique_ptr<Codec> make_none(const CodecSettings& settings) {
  return std::make_unique<None>(settings.dtype);
}

std::vector<DeviceRun> none_runs(const CodecSettings& /*settings*/, int64_t numel) {
  return {{0, numel, kExactBits}};
}

}  // namespace cgx
