// The functions of cgx.h, section 6. On the CPU they also work in a forked child.
#include "compressor/codec.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "api/api.h"
#include "base/checks.h"
#include "compressor/wrappers.h"
#include "config.h"
#include "config_codec.h"
#include "device/codec.h"
#include "kernel/kernels.h"

namespace {

using namespace cgx;

// Values per block of a sum, so that it stays in the L1 cache.
constexpr int64_t kBlockNumel = 4096;

Dtype to_dtype(int32_t dtype) {
  return in_range<Dtype>("dtype", dtype, 0, CGX_BFLOAT16, "a cgx_dtype_t");
}

// The arguments of a checked call: the codec for the CPU, and the run for GPUs.
struct Call {
  std::unique_ptr<Codec> codec;
  device::Run run;

  int64_t most_bytes() const { return codec->max_bytes(run.numel); }
};

Call make_call(const cgx_codec_t* codec, int64_t numel) {
  check_struct(codec, "cgx_codec_t");
  in_range("numel", numel, 0, kMostElements, kCountsAccepted);
  const cgx_config_t& config = codec->config;
  check_config(config);
  in_range("device", codec->device, CGX_CPU, CGX_CUDA, "a cgx_device_t");
  in_range("rank", codec->rank, 0, INT32_MAX, "0 or more");
  in_range("phase", codec->phase, 0, INT32_MAX, "0 or more");
  CodecSettings settings = settings_of(config, to_dtype(codec->dtype));
  settings.seed = static_cast<uint64_t>(codec->seed);
  auto made = make_codec(settings);
  if (!made->fixed_length()) made = make_framed(std::move(made));
  const int64_t cut = made->cut();
  require(codec->first_index >= 0 && codec->first_index <= INT64_MAX - numel &&
              codec->first_index % cut == 0,
          CGX_INVALID_ARGUMENT, "first_index is ", codec->first_index, "; accepted: a multiple of ",
          cut);
  const Rounding rounding{rounding_of(config), static_cast<uint64_t>(codec->seed),
                          static_cast<uint32_t>(codec->rank), static_cast<uint32_t>(codec->phase)};
  return {std::move(made), {settings, rounding, numel, codec->first_index}};
}

std::unique_ptr<device::Queue> queue_of(const cgx_codec_t* codec, const void* buffer) {
  refuse_forked();
  return device::device_of(buffer).wrap(codec->stream);
}

void sum_on_cpu(const Call& call, const std::byte* messages, int32_t count, int64_t stride,
                std::byte* message) {
  const FixedLengthCodec* codec = call.codec->fixed_length();
  require(codec, CGX_UNSUPPORTED,
          "the size of this compressor's messages depends on the values, so they cannot be summed: "
          "use another one");
  const int64_t grain = codec->grain();
  const int64_t block = std::max(grain, kBlockNumel / grain * grain);
  std::vector<float> sum(std::min(block, call.run.numel));
  for (int64_t first = 0; first < call.run.numel; first += block) {
    const int64_t numel = std::min(block, call.run.numel - first);
    const int64_t at = codec->offset(first);
    const auto bytes = static_cast<size_t>(codec->offset(first + numel) - at);
    const int64_t index = call.run.first_index + first;
    codec->decode({messages + at, bytes}, numel, index, Dtype::kFloat32, sum.data());
    for (int32_t i = 1; i < count; ++i)
      codec->decode_add({messages + i * stride + at, bytes}, numel, index, sum.data(), sum.data());
    codec->encode(Dtype::kFloat32, sum.data(), numel, index, call.run.rounding, message + at);
  }
}

double statistic_of(const CodecSettings& settings, const void* values, int64_t numel) {
  const bool ranges = settings.compressor == CGX_UNIFORM;
  const bool entropy = settings.compressor == CGX_ENTROPY;
  require((ranges || entropy || settings.compressor == CGX_LEVELS) && settings.rotation == 0,
          CGX_UNSUPPORTED,
          "only the errors of compressors uniform, levels and entropy can be predicted, and only "
          "without rotation");
  const int64_t bucket_size = std::min(settings.bucket_size, std::max<int64_t>(1, numel));
  if (settings.skip_incomplete_buckets && !entropy) numel -= numel % settings.bucket_size;
  const BucketRun run{.numel = numel,
                      .bucket_size = bucket_size,
                      .format = ranges ? BucketFormat::kUniform : BucketFormat::kLevels};
  const double measured = kernels().measure(settings.dtype, values, run);
  return ranges ? measured / 12 : measured;
}

void check_conversion(const void* from, const void* to, int64_t numel) {
  in_range("numel", numel, 0, kMostElements, kCountsAccepted);
  check_pointer(from, numel, "from");
  check_pointer(to, numel, "to");
}

}  // namespace

cgx_status_t cgx_sum(int32_t dtype, const void* const* values, int32_t num_values, int64_t numel,
                     float* sum) {
  return guarded_arithmetic([&] {
    const Dtype type = to_dtype(dtype);
    in_range("num_values", num_values, 1, INT32_MAX, "1 or more");
    in_range("numel", numel, 0, kMostElements, kCountsAccepted);
    check_pointer(values, num_values, "values", "pointers");
    for (int32_t i = 0; i < num_values; ++i) check_pointer(values[i], numel, "one of values");
    check_pointer(sum, numel, "sum");
    for (int64_t first = 0; first < numel; first += kBlockNumel) {
      const int64_t count = std::min(kBlockNumel, numel - first);
      const auto at = [&](int32_t i) {
        return static_cast<const std::byte*>(values[i]) + first * size_of(type);
      };
      kernels().convert(type, at(0), Dtype::kFloat32, sum + first, count);
      for (int32_t i = 1; i < num_values; ++i)
        kernels().add(type, at(i), sum + first, sum + first, count);
    }
  });
}

cgx_status_t cgx_convert(int32_t from_dtype, const void* from, int32_t to_type, void* to,
                         int64_t numel) {
  return guarded_arithmetic([&] {
    check_conversion(from, to, numel);
    kernels().convert(to_dtype(from_dtype), from, to_dtype(to_type), to, numel);
  });
}

cgx_status_t cgx_convert_residual(const float* from, int32_t to_type, void* to, int64_t numel) {
  return guarded_arithmetic([&] {
    check_conversion(from, to, numel);
    kernels().scale(from, 1.0f, to_dtype(to_type), to, numel);
  });
}

cgx_status_t cgx_encoded_bytes(const cgx_codec_t* codec, int64_t numel, int64_t* bytes) {
  return guarded_arithmetic([&] {
    const Call made = make_call(codec, numel);
    check_pointer(bytes, 1, "bytes", "int64");
    *bytes = made.most_bytes();
  });
}

cgx_status_t cgx_quantize(const cgx_codec_t* codec, const void* values, int64_t numel, void* bytes,
                          int64_t* written) {
  return guarded_arithmetic([&] {
    const Call made = make_call(codec, numel);
    int64_t length = made.most_bytes();
    check_pointer(values, numel, "values");
    check_pointer(bytes, length, "bytes", "bytes");
    if (codec->device != CGX_CPU)
      device::quantize(*queue_of(codec, values), made.run, values, bytes);
    else
      length = made.codec->encode(made.run.settings.dtype, values, numel, made.run.first_index,
                                  made.run.rounding, static_cast<std::byte*>(bytes));
    if (written) *written = length;
  });
}

cgx_status_t cgx_dequantize(const cgx_codec_t* codec, const void* bytes, int64_t num_bytes,
                            int64_t numel, void* values) {
  return guarded_arithmetic([&] {
    const Call made = make_call(codec, numel);
    in_range("num_bytes", num_bytes, 0, INT64_MAX, "0 or more");
    check_pointer(bytes, num_bytes, "bytes", "bytes");
    check_pointer(values, numel, "values");
    if (codec->device != CGX_CPU) {
      require(num_bytes == made.most_bytes(), CGX_INVALID_ARGUMENT, num_bytes, " bytes for ", numel,
              " values: expected ", made.most_bytes());
      return device::dequantize(*queue_of(codec, values), made.run, bytes, values);
    }
    made.codec->decode({static_cast<const std::byte*>(bytes), static_cast<size_t>(num_bytes)},
                       numel, made.run.first_index, made.run.settings.dtype, values);
  });
}

cgx_status_t cgx_statistic(const cgx_codec_t* codec, const void* values, int64_t numel,
                           double* statistic) {
  return guarded_arithmetic([&] {
    const CodecSettings settings = make_call(codec, numel).run.settings;
    require(codec->device == CGX_CPU, CGX_UNSUPPORTED,
            "statistics support CPU values only: copy them to the host");
    check_pointer(values, numel, "values");
    check_pointer(statistic, 1, "statistic", "double");
    *statistic = statistic_of(settings, values, numel);
  });
}

cgx_status_t cgx_sum_encoded(const cgx_codec_t* codec, const void* messages, int32_t num_messages,
                             int64_t stride, int64_t numel, void* message) {
  return guarded_arithmetic([&] {
    const Call made = make_call(codec, numel);
    const int64_t bytes = made.most_bytes();
    in_range("num_messages", num_messages, 1, INT32_MAX, "1 or more");
    check_pointer(messages, bytes, "messages", "bytes");
    check_pointer(message, bytes, "message", "bytes");
    if (num_messages > 1) check_stride(stride, bytes, num_messages);
    if (codec->device != CGX_CPU)
      return device::sum_encoded(*queue_of(codec, messages), made.run, messages, num_messages,
                                 stride, message);
    sum_on_cpu(made, static_cast<const std::byte*>(messages), num_messages, stride,
               static_cast<std::byte*>(message));
  });
}
