// What a codec does that has no better way of its own.
#include "compressor/codec.h"

#include "kernel/kernels.h"

namespace cgx {

int64_t Codec::encode_keeping(const float* values, int64_t numel, int64_t first_index,
                              const Rounding& rounding, std::byte* bytes, float* lost) const {
  const int64_t written = encode(Dtype::kFloat32, values, numel, first_index, rounding, bytes);
  decode({bytes, static_cast<size_t>(written)}, numel, Dtype::kFloat32, lost);
  kernels().subtract(values, lost, lost, numel);
  return written;
}

}  // namespace cgx
