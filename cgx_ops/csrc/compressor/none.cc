#include "compressor/none.h"

#include "base/status.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

class None final : public Compressor {
 public:
  explicit None(Dtype wire) : wire_(wire) {}

  int64_t grain() const override { return 1; }
  int64_t max_bytes(int64_t numel) const override { return numel * size_of(wire_); }

  int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t /*first_index*/,
                 const Rounding& /*rounding*/, std::byte* bytes) const override {
    kernels().convert(dtype, values, wire_, bytes, numel);
    return max_bytes(numel);
  }

  void decode(const std::byte* bytes, int64_t num_bytes, int64_t numel, Dtype dtype,
              void* values) const override {
    check_length(num_bytes, numel);
    kernels().convert(wire_, bytes, dtype, values, numel);
  }

  void decode_add(const std::byte* bytes, int64_t num_bytes, int64_t numel, const float* base,
                  float* sum) const override {
    check_length(num_bytes, numel);
    kernels().add(wire_, bytes, base, sum, numel);
  }

 private:
  void check_length(int64_t num_bytes, int64_t numel) const {
    require(num_bytes == max_bytes(numel), CGX_INTERNAL, "exact message of ", num_bytes,
            " bytes for ", numel, " values: expected ", max_bytes(numel));
  }

  const Dtype wire_;
};

}  // namespace

std::unique_ptr<Compressor> make_none(const CompressorSettings& settings) {
  return std::make_unique<None>(settings.dtype);
}

}  // namespace cgx
