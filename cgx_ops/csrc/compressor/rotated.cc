// Blocks of `rotation` values are multiplied by a Hadamard matrix with random signs, so that what
// is sent is close to Gaussian, whatever the values are. A bucket's last values, if they fill no
// block, are sent as they are. The matrix is its own inverse but for the signs: decoding rotates
// back. It is orthogonal, so the error's length stays.
#include <algorithm>
#include <utility>
#include <vector>

#include "compressor/around.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

// Used within one call only: a collective's steps may run on any thread.
thread_local std::vector<float> rotated;

float* room_for(int64_t numel) {
  if (static_cast<int64_t>(rotated.size()) < numel) rotated.resize(numel);
  return rotated.data();
}

class Rotated final : public SlicedCodec {
 public:
  Rotated(std::unique_ptr<Codec> inner, int rotation)
      : inner_(std::move(inner)), rotation_(rotation) {}

  int64_t grain() const override { return inner_->sliced()->grain(); }
  int64_t offset(int64_t first) const override { return inner_->max_bytes(first); }

  int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t first_index,
                 const Rounding& rounding, std::byte* bytes) const override {
    return by_blocks(numel, [&](int64_t first, int64_t count) {
      float* block = room_for(count);
      const auto* from = static_cast<const std::byte*>(values) + first * size_of(dtype);
      kernels().convert(dtype, from, Dtype::kFloat32, block, count);
      rotate(block, count);
      return inner_->encode(Dtype::kFloat32, block, count, first_index + first, rounding,
                            bytes + offset(first));
    });
  }

  void decode(std::span<const std::byte> bytes, int64_t numel, int64_t first_index, Dtype dtype,
              void* values) const override {
    check_length(bytes, numel);
    by_blocks(numel, [&](int64_t first, int64_t count) {
      const float* block = decoded(bytes, first, count, first_index);
      kernels().convert(Dtype::kFloat32, block, dtype,
                        static_cast<std::byte*>(values) + first * size_of(dtype), count);
      return 0;
    });
  }

  void decode_add(std::span<const std::byte> bytes, int64_t numel, int64_t first_index,
                  const float* base, float* sum) const override {
    check_length(bytes, numel);
    by_blocks(numel, [&](int64_t first, int64_t count) {
      const float* block = decoded(bytes, first, count, first_index);
      kernels().add(Dtype::kFloat32, block, base + first, sum + first, count);
      return 0;
    });
  }

 private:
  // Blocks of whole buckets that stay in the first-level cache. Returns the sum of what they
  // return.
  template <typename Do>
  int64_t by_blocks(int64_t numel, const Do& work) const {
    const int64_t block = std::max<int64_t>(grain(), 2048 / grain() * grain());
    int64_t sum = 0;
    for (int64_t first = 0; first < numel; first += block)
      sum += work(first, std::min(block, numel - first));
    return sum;
  }

  const float* decoded(std::span<const std::byte> bytes, int64_t first, int64_t count,
                       int64_t first_index) const {
    float* block = room_for(count);
    inner_->decode(slice(bytes, first, count), count, first_index + first, Dtype::kFloat32, block);
    rotate_back(block, count);
    return block;
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
