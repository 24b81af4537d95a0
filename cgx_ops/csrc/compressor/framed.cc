// A message contains the grains of `inner` in order, each preceded by its length in bytes.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/status.h"
#include "compressor/wrappers.h"

namespace cgx {
namespace {

constexpr int64_t kLengthBytes = 4;

class Framed final : public Codec {
 public:
  explicit Framed(std::unique_ptr<Codec> inner) : inner_(std::move(inner)) {}

  int64_t grain() const override { return inner_->grain(); }
  int64_t cut() const override { return inner_->cut(); }
  int64_t max_bytes(int64_t numel) const override {
    const int64_t grains = numel / grain() + (numel % grain() != 0);
    return inner_->max_bytes(numel) + grains * kLengthBytes;
  }

  int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t first_index,
                 const Rounding& rounding, std::byte* bytes) const override {
    int64_t end = 0;
    for (int64_t first = 0; first < numel; first += grain()) {
      const auto* from = static_cast<const std::byte*>(values) + first * size_of(dtype);
      const auto length = static_cast<uint32_t>(
          inner_->encode(dtype, from, std::min(grain(), numel - first), first_index + first,
                         rounding, bytes + end + kLengthBytes));
      std::memcpy(bytes + end, &length, kLengthBytes);
      end += kLengthBytes + length;
    }
    return end;
  }

  void decode(std::span<const std::byte> bytes, int64_t numel, int64_t first_index, Dtype dtype,
              void* values) const override {
    for_grains(bytes, numel, [&](std::span<const std::byte> grain, int64_t first, int64_t count) {
      inner_->decode(grain, count, first_index + first, dtype,
                     static_cast<std::byte*>(values) + first * size_of(dtype));
    });
  }

  void decode_add(std::span<const std::byte> bytes, int64_t numel, int64_t first_index,
                  const float* base, float* sum) const override {
    for_grains(bytes, numel, [&](std::span<const std::byte> grain, int64_t first, int64_t count) {
      inner_->decode_add(grain, count, first_index + first, base + first, sum + first);
    });
  }

 private:
  // Calls work(bytes of a grain, its first element, number of its elements).
  template <typename Work>
  void for_grains(std::span<const std::byte> bytes, int64_t numel, const Work& work) const {
    for (int64_t first = 0; first < numel; first += grain()) {
      uint32_t length = 0;
      const bool has_length = bytes.size() >= kLengthBytes;
      if (has_length) std::memcpy(&length, bytes.data(), kLengthBytes);
      require(has_length && length <= bytes.size() - kLengthBytes, CGX_INVALID_ARGUMENT,
              bytes.size(), " bytes are left for the values from ", first, " on: too few");
      work(bytes.subspan(kLengthBytes, length), first, std::min(grain(), numel - first));
      bytes = bytes.subspan(kLengthBytes + length);
    }
    require(bytes.empty(), CGX_INVALID_ARGUMENT, bytes.size(), " bytes too many for ", numel,
            " values");
  }

  const std::unique_ptr<Codec> inner_;
};

}  // namespace

std::unique_ptr<Codec> make_framed(std::unique_ptr<Codec> inner) {
  return std::make_unique<Framed>(std::move(inner));
}

}  // namespace cgx
