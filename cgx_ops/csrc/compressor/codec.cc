// Default implementations.
#include "compressor/codec.h"

#include <vector>

#include "base/status.h"
#include "compressor/blocks.h"
#include "kernel/kernels.h"

namespace cgx {

int64_t Codec::encode_keeping(const float* values, int64_t numel, int64_t first_index,
                              const Rounding& rounding, std::byte* bytes, float* errors) const {
  thread_local std::vector<float> block;
  float* const decoded = room(block, numel);
  const int64_t written = encode(Dtype::kFloat32, values, numel, first_index, rounding, bytes);
  decode({bytes, static_cast<size_t>(written)}, numel, first_index, Dtype::kFloat32, decoded);
  kernels().subtract(values, decoded, errors, numel);
  return written;
}

void FixedLengthCodec::check_length(std::span<const std::byte> bytes, int64_t numel) const {
  require(static_cast<int64_t>(bytes.size()) == offset(numel), CGX_INVALID_ARGUMENT, bytes.size(),
          " bytes for ", numel, " values: expected ", offset(numel));
}

}  // namespace cgx
