#include "compressor/sparse.h"

#include <cmath>
#include <cstring>

#include "base/half.h"
#include "base/status.h"
#include "compressor/blocks.h"
#include "compressor/bucketed.h"
#include "compressor/plain.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

// One bucket that is never full, so it holds all values.
std::unique_ptr<Codec> codec_of_values(CodecSettings settings) {
  settings.bucket_size = kMostIndices;
  switch (settings.value_bits) {
    case 32:
      return make_none(settings);
    case 16:
      return make_half(settings);
    case 1:
      return make_bucketed(settings, BucketFormat::kLevels, 1);
    default:
      return make_bucketed(settings, BucketFormat::kMagnitudes, settings.value_bits);
  }
}

float with_one_nan(float x) { return x != x ? __builtin_bit_cast(float, kFloat32Nan) : x; }

// Callers' values may be unaligned.
float load(const float* at) {
  float value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}
void store(float value, float* at) { std::memcpy(at, &value, sizeof(value)); }

}  // namespace

int64_t share_of(const CodecSettings& settings, int64_t numel) {
  constexpr int64_t kBillionths = 1000000000;
  const __int128 share = static_cast<__int128>(settings.density) * numel;
  const auto count = static_cast<int64_t>((share + kBillionths - 1) / kBillionths);
  return count < 1 ? 1 : count;
}

ChosenValues::ChosenValues(const CodecSettings& settings) : codec_(codec_of_values(settings)) {}

void ChosenValues::encode(const float* values, int64_t count, std::byte* bytes) const {
  codec_->encode(Dtype::kFloat32, values, count, 0, {}, bytes);
}

void ChosenValues::decode(std::span<const std::byte> bytes, int64_t count, float* values) const {
  codec_->decode(bytes, count, 0, Dtype::kFloat32, values);
}

void Chosen::resize(int64_t count) {
  indices.resize(count);
  values.resize(count);
}

void Chosen::gather(const float* from) {
  for (size_t i = 0; i < indices.size(); ++i) values[i] = with_one_nan(load(from + indices[i]));
}

void Chosen::scatter(int64_t numel, Dtype dtype, void* to) const {
  std::memset(to, 0, numel * size_of(dtype));
  auto* bytes = static_cast<std::byte*>(to);
  for (size_t i = 0; i < indices.size(); ++i) {
    const float value = values[i] + 0.0f;
    kernels().convert(Dtype::kFloat32, &value, dtype, bytes + indices[i] * size_of(dtype), 1);
  }
}

void Chosen::add(int64_t numel, const float* base, float* sum) const {
  // Also adds zeros between the indices, so that -0 and NaN are normalized as by other codecs.
  kernels().add_zero(base, sum, numel);
  for (size_t i = 0; i < indices.size(); ++i) {
    float* const at = sum + indices[i];
    store(with_one_nan(load(at) + values[i]), at);
  }
}

void Chosen::subtract_from(int64_t numel, const float* from, float* errors) const {
  // Scaling by 1 copies and replaces non-finite values by 0. In place it is rarely needed.
  const auto copy = [&] { kernels().scale(from, 1.0f, Dtype::kFloat32, errors, numel); };
  if (errors != from) copy();
  bool all_finite = true;
  for (size_t i = 0; i < indices.size(); ++i) {
    const float error = load(from + indices[i]) - (values[i] + 0.0f);
    all_finite = all_finite && std::isfinite(error);
    store(std::isfinite(error) ? error : 0.0f, errors + indices[i]);
  }
  if (errors == from && !all_finite) copy();
}

const float* as_floats(Dtype dtype, const void* values, int64_t numel) {
  if (dtype == Dtype::kFloat32) return static_cast<const float*>(values);
  thread_local std::vector<float> block;
  float* const wide = room(block, numel);
  kernels().convert(dtype, values, Dtype::kFloat32, wide, numel);
  return wide;
}

}  // namespace cgx
