// Multiplies blocks of `rotation` values by a Hadamard matrix with random signs, so that the
// encoded values are nearly Gaussian. The last values of a bucket that do not fill a block are not
// rotated. Up to the signs, the matrix is its own inverse, so decoding rotates again. It is
// orthogonal, so the norm of the error is unchanged.
#include <algorithm>
#include <utility>

#include "compressor/blocks.h"
#include "compressor/wrappers.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

class Rotated final : public FixedLengthCodec {
 public:
  Rotated(std::unique_ptr<Codec> inner, int rotation)
      : inner_(std::move(inner)), rotation_(rotation) {}

  int64_t grain() const override { return inner_->grain(); }
  int64_t offset(int64_t first) const override { return inner_->max_bytes(first); }

  int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t first_index,
                 const Rounding& rounding, std::byte* bytes) const override {
    for_blocks(numel, grain(), [&](int64_t first, int64_t count, float* block) {
      const auto* from = static_cast<const std::byte*>(values) + first * size_of(dtype);
      kernels().convert(dtype, from, Dtype::kFloat32, block, count);
      rotate(block, count);
      inner_->encode(Dtype::kFloat32, block, count, first_index + first, rounding,
                     bytes + offset(first));
    });
    return offset(numel);
  }

  void decode(std::span<const std::byte> bytes, int64_t numel, int64_t first_index, Dtype dtype,
              void* values) const override {
    check_length(bytes, numel);
    for_blocks(numel, grain(), [&](int64_t first, int64_t count, float* block) {
      decode_block(slice(bytes, first, count), count, first_index + first, block);
      kernels().convert(Dtype::kFloat32, block, dtype,
                        static_cast<std::byte*>(values) + first * size_of(dtype), count);
    });
  }

  void decode_add(std::span<const std::byte> bytes, int64_t numel, int64_t first_index,
                  const float* base, float* sum) const override {
    check_length(bytes, numel);
    for_blocks(numel, grain(), [&](int64_t first, int64_t count, float* block) {
      decode_block(slice(bytes, first, count), count, first_index + first, block);
      kernels().add(Dtype::kFloat32, block, base + first, sum + first, count);
    });
  }

 private:
  void decode_block(std::span<const std::byte> bytes, int64_t numel, int64_t first_index,
                    float* block) const {
    inner_->decode(bytes, numel, first_index, Dtype::kFloat32, block);
    rotate_back(block, numel);
  }

  void rotate(float* values, int64_t numel) const {
    for (int64_t at = 0; at < numel; at += grain())
      kernels().rotate(values + at, std::min(grain(), numel - at), rotation_);
  }
  void rotate_back(float* values, int64_t numel) const {
    for (int64_t at = 0; at < numel; at += grain())
      kernels().rotate_back(values + at, std::min(grain(), numel - at), rotation_);
  }

  const std::unique_ptr<Codec> inner_;
  const int rotation_;
};

}  // namespace

std::unique_ptr<Codec> make_rotated(std::unique_ptr<Codec> inner, int rotation) {
  return std::make_unique<Rotated>(std::move(inner), rotation);
}

}  // namespace cgx
