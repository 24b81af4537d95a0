// Decodes any bytes with any settings of any compressor. A message of a wrong length is rejected.
// One of the right length is decoded to the same bits by all CPU targets, unless its indices are
// invalid. Damaged messages of variable length are decoded or rejected, and damaged streams of the
// entropy coder give the same on all CPU targets. No byte outside of the message is read or
// written.
#include "compressor/codec.h"

#include <cstring>

#include "base/float_mode.h"
#include "base/half.h"
#include "base/status.h"
#include "cgx/cgx.h"
#include "compressor/frequencies.h"
#include "input.h"
#include "kernel/kernels.h"

using namespace cgx;

namespace {

using Bytes = std::vector<std::byte>;

// Settings from any bytes, some of them invalid.
cgx_codec_t any_codec(Input& input) {
  auto codec = make<cgx_codec_t>();
  codec.dtype = input.number<int8_t>();
  codec.config.bits = input.number<int8_t>();
  codec.config.bucket_size = input.number<int64_t>();
  codec.config.skip_incomplete_buckets = input.flag();
  codec.first_index = input.number<int64_t>();
  return codec;
}

void check_any(Input& input) {
  const cgx_codec_t codec = any_codec(input);
  const auto numel = input.number<int64_t>();
  int64_t bytes = -1;
  if (cgx_encoded_bytes(&codec, numel, &bytes) == CGX_OK) FUZZ_CHECK(bytes >= 0);
}

template <typename Decode>
void same_on_all_targets(int64_t bytes, const Decode& decode) {
  Bytes first;
  for (const Kernels* kernels : available_kernels()) {
    Bytes values(bytes);
    decode(*kernels, values.data());
    if (first.empty()) first = values;
    FUZZ_CHECK(values == first);
  }
}

// Valid settings, since checking a config is not the codec's task.
CodecSettings any_settings(Input& input) {
  constexpr int kBits[] = {1, 2, 3, 4, 5, 6, 7, 8, kExactBits};
  constexpr int kValueBits[] = {1, 2, 3, 4, 5, 6, 7, 8, 16, 32};
  constexpr int kRotations[] = {0, 0, 2, 32, 1024};
  CodecSettings settings{static_cast<Dtype>(input.below(3)), kBits[input.below(9)],
                         1 + input.number<uint16_t>() % 600, input.flag()};
  settings.compressor = static_cast<cgx_compressor_t>(input.below(CGX_NVFP4 + 1));
  if (input.below(8) == 0) settings.compressor = input.flag() ? CGX_LOSSLESS : CGX_ENTROPY;
  settings.rate = 250000000 + input.number<uint64_t>() % 7750000001;
  settings.density = 1 + input.number<uint32_t>() % 1000000000;
  settings.value_bits = kValueBits[input.below(10)];
  settings.seed = input.number<uint8_t>();
  if (settings.bits == kExactBits) return settings;
  if (settings.compressor == CGX_LEVELS) settings.bits = 1 + settings.bits % 4;
  if (settings.compressor == CGX_QSGD && settings.bits == 1) settings.bits = 2;
  const bool has_no_buckets =
      CGX_HALF <= settings.compressor && settings.compressor <= CGX_LOSSLESS;
  if (!has_no_buckets && settings.compressor != CGX_SIGN)
    settings.rotation = kRotations[input.below(5)];
  return settings;
}

void check_decoding(Input& input) {
  const CodecSettings settings = any_settings(input);
  const auto to = static_cast<Dtype>(input.below(3));
  const int64_t numel = input.number<uint16_t>() % 700;
  const auto codec = make_codec(settings);
  const int64_t expected = codec->max_bytes(numel);
  const bool sparse = settings.bits != kExactBits && settings.compressor == CGX_TOPK;
  const bool may_be_invalid = sparse || !codec->fixed_length();
  const auto length = static_cast<int64_t>(input.near(expected));
  const Bytes message = input.flag() ? input.bytes(length) : input.pattern(length);
  Bytes values(numel * size_of(to));
  std::vector<float> sum(numel, 1.0f);
  const auto decode = [&](const auto& work) {
    try {
      work();
      FUZZ_CHECK(length == expected || !codec->fixed_length());
    } catch (const Error&) {
      FUZZ_CHECK(length != expected || may_be_invalid);
    }
  };
  decode([&] { codec->decode(message, numel, /*first_index=*/0, to, values.data()); });
  decode([&] { codec->decode_add(message, numel, /*first_index=*/0, sum.data(), sum.data()); });
  const bool blocks = CGX_MXFP8 <= settings.compressor && settings.compressor <= CGX_NVFP4;
  if (length != expected || settings.bits == kExactBits || settings.skip_incomplete_buckets ||
      settings.rotation != 0 || !(settings.compressor == CGX_UNIFORM || blocks) ||
      (blocks && to != Dtype::kFloat32))
    return;
  if (to == Dtype::kFloat32 && !blocks) {
    for (int64_t i = 0; i < numel; ++i) {
      uint32_t bits;
      std::memcpy(&bits, values.data() + 4 * i, 4);
      FUZZ_CHECK(!is_nan(bits) || bits == kFloat32Nan);
    }
  }
  const Coding coding = codec_entry(settings).device_coding(settings);
  const BucketRun run{numel, 0, settings.bucket_size, coding.bits, coding.format};
  same_on_all_targets(values.size(), [&](const Kernels& kernels, std::byte* into) {
    kernels.dequantize(message.data(), run, to, into);
  });
  const std::vector<float> base(numel, 0.5f);
  same_on_all_targets(numel * 4, [&](const Kernels& kernels, std::byte* into) {
    kernels.dequantize_add(message.data(), run, base.data(), reinterpret_cast<float*>(into));
  });
}

// Returns whether decoding succeeds; otherwise it must be an error of the message.
template <typename Decode>
bool succeeds(const Decode& decode) {
  try {
    decode();
    return true;
  } catch (const Error& error) {
    FUZZ_CHECK(error.status() == CGX_INVALID_ARGUMENT);
    return false;
  }
}

// Damaged messages of codecs without a fixed length.
void check_variable_length(Input& input) {
  CodecSettings settings{static_cast<Dtype>(input.below(3)), 4};
  const bool exact = input.flag();
  settings.compressor = exact ? CGX_LOSSLESS : CGX_ENTROPY;
  settings.rate = 250000000 + input.number<uint64_t>() % 7750000001;
  const auto to = static_cast<Dtype>(input.below(3));
  // Only few inputs are long, because those take long. Long blocks of entropy have 4 to 16 lanes.
  const int range = input.below(64);
  const auto number = int64_t{input.number<uint16_t>()};
  const int64_t numel = range == 0 && !exact ? 65536 - number % 49153
                        : range < 4          ? number % 16384
                                             : number % 700;
  const auto codec = make_codec(settings);
  const Bytes values = input.pattern(numel * size_of(settings.dtype));
  Bytes message(codec->max_bytes(numel));
  const auto mode = !exact && input.flag() ? RoundingMode::kShift : RoundingMode::kNearest;
  message.resize(
      codec->encode(settings.dtype, values.data(), numel, 0, {.mode = mode}, message.data()));
  Bytes decoded(values.size());
  codec->decode(message, numel, 0, settings.dtype, decoded.data());
  FUZZ_CHECK(!exact || decoded == values);
  const Bytes damaged = input.damaged(message);
  Bytes any(numel * size_of(to));
  std::vector<float> sum(numel, 1.0f);
  const bool valid = succeeds([&] { codec->decode(damaged, numel, 0, to, any.data()); });
  const bool adds = succeeds([&] { codec->decode_add(damaged, numel, 0, sum.data(), sum.data()); });
  FUZZ_CHECK(valid == adds);
}

// Damaged frequencies and streams, with any number of lanes.
void check_entropy_coder(Input& input) {
  const int lanes = 1 << input.below(6);
  const int64_t numel = 1 + input.number<uint16_t>() % 700;
  const auto pattern = input.pattern(numel);
  const auto* symbols = reinterpret_cast<const uint8_t*>(pattern.data());
  Counts counts;
  kernels().count_symbols(symbols, numel, counts.data());
  Frequencies frequencies = frequencies_of(counts);
  Bytes stream(most_rans_bytes(numel, lanes));
  stream.resize(kernels().rans_encode(symbols, numel, lanes, frequencies.data(), stream.data()));
  Bytes table(kMostFrequencyBytes);
  table.resize(write_frequencies(frequencies, table.data()));
  if (input.flag()) {
    const Bytes damaged = input.damaged(table);
    const int alphabet = 1 + input.number<uint8_t>();
    if (!succeeds([&] { read_frequencies(damaged, alphabet, frequencies); })) return;
    int sum = 0;
    for (const uint16_t frequency : frequencies) sum += frequency;
    FUZZ_CHECK(sum == kFrequencySum);
  }
  const Bytes damaged = input.damaged(stream);
  std::vector<Bytes> accepted;
  for (const Kernels* kernels : available_kernels()) {
    Bytes decoded(numel);
    const bool valid =
        kernels->rans_decode(damaged.data(), static_cast<int64_t>(damaged.size()), numel, lanes,
                             frequencies.data(), reinterpret_cast<uint8_t*>(decoded.data()));
    accepted.push_back(valid ? decoded : Bytes{});
    FUZZ_CHECK(accepted.back() == accepted.front());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const FloatMode mode;
  Input input(data, size);
  switch (input.below(8)) {
    case 0:
      check_any(input);
      break;
    case 1:
      check_variable_length(input);
      break;
    case 2:
      check_entropy_coder(input);
      break;
    default:
      check_decoding(input);
  }
  return 0;
}
