#include "compressor/entropy.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/half.h"
#include "base/noise_position.h"
#include "base/philox.h"
#include "base/status.h"
#include "compressor/bit_fields.h"
#include "compressor/entropy_search.h"
#include "compressor/frequencies.h"
#include "compressor/sparse.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

constexpr int64_t kGrain = 65536;
constexpr int64_t kCut = 4096;           // kGrain would make the shards of small tensors unequal
constexpr int64_t kChunk = 2048;         // values that fit the L1 cache
constexpr int64_t kSmallestCoded = 128;  // values
constexpr int64_t kLeastBytes = 12;
constexpr int kMostLanes = 16;

// The first byte: the kind (2 bits), the width (4 bits) and flags.
enum Kind : uint8_t { kConstant, kFixed, kCoded };
constexpr uint8_t kHasValue = 0x04, kHasExtra = 0x40, kDithered = 0x80;
constexpr int64_t kKeyBytes = 3, kLengthBytes = 3;

int64_t wanted_bytes(int64_t numel, int64_t rate) {
  return std::max(numel * rate / 8000000000, kLeastBytes);
}

// Fewer than rans_lanes(), because their states are a part of the rate.
int lanes_of(int64_t numel) {
  int lanes = 1;
  while (lanes < kMostLanes && numel >= 8192 * int64_t{lanes}) lanes *= 2;
  return lanes;
}

// The width of codes of a fixed length, or 0.
int fixed_width(int64_t numel, int64_t rate) {
  if (numel >= kSmallestCoded) return 0;
  const int64_t width = std::min<int64_t>(8, 8 * (wanted_bytes(numel, rate) - 6) / numel);
  return width >= 2 ? static_cast<int>(width) : 0;
}

uint16_t noise_of(int64_t index, const Rounding& rounding) {
  const auto [counter, half] = noise_position(static_cast<uint64_t>(index));
  uint64_t words[4] = {counter, counter >> 32, rounding.rank, rounding.phase};
  philox4x32_7(words, PhiloxKeys(rounding.seed));
  return static_cast<uint16_t>(words[half / 2] >> 16 * (half % 2));
}

int64_t packed_bytes(int64_t numel, int64_t bits) { return (numel * bits + 7) / 8; }

// ---- encoding ----

// About the size of a coded block, in bits. A lane takes 32 bits, and its last state holds about 8
// bits of the symbols.
int64_t size_of_block(const EntropyLevels& levels, int64_t numel, const EntropyGrid& grid) {
  const Frequencies frequencies = frequencies_of(levels.counts);
  std::byte written[kMostFrequencyBytes];
  int64_t head = 1 + kKeyBytes + (grid.dithered ? 2 : 1) + write_frequencies(frequencies, written);
  const int64_t extra = levels.extra_bits();
  if (extra > 0) head += kLengthBytes + packed_bytes(1, extra);
  head += packed_bytes(numel, grid.width);
  return 8 * head + 24 * lanes_of(numel) + (cost_of(levels.counts, frequencies) >> kCostBits);
}

// Writes the key of the step, and the shift or the noise.
std::byte* write_grid(const EntropyGrid& grid, std::byte* to) {
  const uint32_t key = std::bit_cast<uint32_t>(grid.step) >> 8;
  std::memcpy(to, &key, kKeyBytes);
  if (grid.dithered) {
    std::memcpy(to + kKeyBytes, &grid.dither, 2);
    return to + kKeyBytes + 2;
  }
  to[kKeyBytes] = static_cast<std::byte>(static_cast<int>(grid.shift * 256));
  return to + kKeyBytes + 1;
}

// Returns the bytes written to `block`, which it resizes.
int64_t write_coded(const EntropyLevels& levels, int64_t numel, const EntropyGrid& grid,
                    std::vector<std::byte>& block) {
  const int64_t extra_bytes = packed_bytes(1, levels.extra_bits());
  const int lanes = lanes_of(numel);
  const size_t room = 16 + kMostFrequencyBytes + extra_bytes + packed_bytes(numel, grid.width) +
                      most_rans_bytes(numel, lanes);
  if (block.size() < room) block.resize(room);
  const Frequencies frequencies = frequencies_of(levels.counts);
  block[0] = static_cast<std::byte>(kCoded | grid.width << 2 | (extra_bytes > 0 ? kHasExtra : 0) |
                                    (grid.dithered ? kDithered : 0));
  std::byte* to = write_grid(grid, block.data() + 1);
  to += write_frequencies(frequencies, to);
  if (extra_bytes > 0) {
    std::memcpy(to, &extra_bytes, kLengthBytes);
    BitPacker packer(to + kLengthBytes);
    const uint32_t* extra = levels.extra.data();
    for (int64_t i = 0; i < numel; ++i)
      if (levels.symbols[i] >= kDirectSymbols)
        packer.put(*extra++, extra_bits_of(levels.symbols[i]));
    to = packer.finish();
  }
  if (grid.width > 0) {
    BitPacker packer(to);
    for (int64_t i = 0; i < numel; ++i) packer.put(levels.low[i], grid.width);
    to = packer.finish();
  }
  to += kernels().rans_encode(levels.symbols.data(), numel, lanes, frequencies.data(), to);
  return to - block.data();
}

int64_t write_constant(float value, std::byte* to) {
  to[0] = std::byte{kConstant};
  if (std::bit_cast<uint32_t>(value) == 0) return 1;
  to[0] |= std::byte{kHasValue};
  std::memcpy(to + 1, &value, sizeof(value));
  return 1 + sizeof(value);
}

int64_t write_fixed(const float* values, int64_t numel, uint32_t largest, int width,
                    EntropyGrid grid, std::byte* block) {
  const int32_t most = (1 << (width - 1)) - 1;
  const float levels = static_cast<float>(most) + (grid.dithered ? 0.0f : 0.5f);
  const int64_t key = (std::bit_cast<uint32_t>(std::bit_cast<float>(largest) / levels) >> 8) + 2;
  grid.step = step_of_key(std::clamp(key, kLowestKey, kHighestKey));
  block[0] = static_cast<std::byte>(kFixed | (width - 1) << 2 | (grid.dithered ? kDithered : 0));
  // At most 8 bits, so no value has extra bits. All bits of a level are low bits.
  thread_local EntropyLevels found;
  grid.width = 0;
  found.encode(values, numel, 16, grid);
  BitPacker packer(write_grid(grid, block + 1));
  const uint32_t* extra = found.extra.data();
  for (int64_t i = 0; i < numel; ++i) {
    uint32_t z = found.symbols[i];
    if (z >= kDirectSymbols) z = (2 + z % 2) << extra_bits_of(static_cast<int>(z)) | *extra++;
    const int32_t level = static_cast<int32_t>(z >> 1) ^ -static_cast<int32_t>(z & 1);
    packer.put(static_cast<uint32_t>(std::clamp(level, -most, most)) & ((1u << width) - 1), width);
  }
  return packer.finish() - block;
}

// ---- decoding ----

void check(bool valid) {
  require(valid, CGX_INVALID_ARGUMENT, "the bytes are not a block of compressor='entropy'");
}

// The content of a block: symbols, or one value for all.
struct Content {
  EntropyGrid grid;
  const uint8_t *symbols = nullptr, *low = nullptr;
  const uint32_t* extra = nullptr;
  float value = 0;  // if there are no symbols

  // Calls work(first, count, values) for chunks in order.
  template <typename Work>
  void for_chunks(int64_t numel, const Work& work) const {
    float chunk[kChunk];
    if (symbols == nullptr) std::fill(chunk, chunk + kChunk, value);
    const uint32_t* next = extra;
    for (int64_t first = 0; first < numel; first += kChunk) {
      const int64_t count = std::min(kChunk, numel - first);
      if (symbols != nullptr)
        next +=
            kernels().entropy_values(symbols + first, low + first, next, count, first, grid, chunk);
      work(first, count, chunk);
    }
  }
};

// A block whose symbols are decoded.
struct Decoded {
  EntropyGrid grid;
  std::vector<uint8_t> symbols, low;
  std::vector<uint32_t> extra;
};

std::span<const std::byte> read_grid(std::span<const std::byte> bytes, EntropyGrid* grid) {
  const int64_t used = 1 + kKeyBytes + (grid->dithered ? 2 : 1);
  check(static_cast<int64_t>(bytes.size()) >= used);
  uint32_t key = 0;
  std::memcpy(&key, bytes.data() + 1, kKeyBytes);
  check(key >= kLowestKey && key <= kHighestKey);
  grid->step = step_of_key(key);
  if (grid->dithered)
    std::memcpy(&grid->dither, bytes.data() + 1 + kKeyBytes, 2);
  else
    grid->shift = static_cast<float>(static_cast<int8_t>(bytes[1 + kKeyBytes])) / 256;
  return bytes.subspan(used);
}

Content read_constant(std::span<const std::byte> bytes) {
  const bool has_value = bytes[0] == std::byte{kConstant | kHasValue};
  check((has_value || bytes[0] == std::byte{kConstant}) && bytes.size() == (has_value ? 5 : 1));
  Content content;
  if (has_value) std::memcpy(&content.value, bytes.data() + 1, sizeof(content.value));
  if (!std::isfinite(content.value)) content.value = std::bit_cast<float>(kFloat32Nan);
  return content;
}

// Levels of a fixed length become low bits, with a symbol for their sign.
void read_fixed(std::span<const std::byte> bytes, int64_t numel, int width, Decoded* decoded) {
  check(width >= 2 && static_cast<int64_t>(bytes.size()) == packed_bytes(numel, width));
  BitUnpacker unpacker(bytes);
  decoded->grid.width = width - 1;
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t code = unpacker.take(width);
    decoded->symbols[i] = static_cast<uint8_t>(code >> (width - 1));
    decoded->low[i] = static_cast<uint8_t>(code & ((1u << (width - 1)) - 1));
  }
  check(unpacker.ended());
}

// Reads the extra bits of symbols far from 0.
void read_extra(std::span<const std::byte> bytes, int64_t numel, Decoded* decoded) {
  Counts counts;
  kernels().count_symbols(decoded->symbols.data(), numel, counts.data());
  int64_t bits = 0, used = 0;
  for (int s = kDirectSymbols; s < kEntropySymbols; ++s) {
    bits += counts[s] * int64_t{extra_bits_of(s)};
    used += counts[s];
  }
  check(static_cast<int64_t>(bytes.size()) == packed_bytes(1, bits));
  decoded->extra.resize(used);
  if (used == 0) return;
  BitUnpacker unpacker(bytes);
  uint32_t* extra = decoded->extra.data();
  for (int64_t i = 0; i < numel; ++i) {
    const int symbol = decoded->symbols[i];
    if (symbol < kDirectSymbols) continue;
    *extra = unpacker.take(extra_bits_of(symbol));
    check(symbol != kExactSymbol || std::isfinite(std::bit_cast<float>(*extra)));
    ++extra;
  }
  check(unpacker.ended());
}

void read_coded(std::span<const std::byte> bytes, int64_t numel, uint8_t flags, Decoded* decoded) {
  decoded->grid.width = flags >> 2 & 0xf;
  check(decoded->grid.width <= 4);
  Frequencies frequencies;
  bytes = bytes.subspan(read_frequencies(bytes, kEntropySymbols, frequencies));
  std::span<const std::byte> extra;
  if ((flags & kHasExtra) != 0) {
    size_t length = 0;
    check(bytes.size() >= kLengthBytes);
    std::memcpy(&length, bytes.data(), kLengthBytes);
    check(length > 0 && length <= bytes.size() - kLengthBytes);
    extra = bytes.subspan(kLengthBytes, length);
    bytes = bytes.subspan(kLengthBytes + length);
  }
  const int64_t low_bytes = packed_bytes(numel, decoded->grid.width);
  check(static_cast<int64_t>(bytes.size()) >= low_bytes);
  if (low_bytes > 0) {
    BitUnpacker unpacker(bytes.first(low_bytes));
    for (int64_t i = 0; i < numel; ++i)
      decoded->low[i] = static_cast<uint8_t>(unpacker.take(decoded->grid.width));
    check(unpacker.ended());
  }
  bytes = bytes.subspan(low_bytes);
  check(kernels().rans_decode(bytes.data(), static_cast<int64_t>(bytes.size()), numel,
                              lanes_of(numel), frequencies.data(), decoded->symbols.data()));
  const auto is_used = [](uint16_t frequency) { return frequency != 0; };
  if (!extra.empty() ||
      std::any_of(frequencies.begin() + kDirectSymbols, frequencies.end(), is_used))
    read_extra(extra, numel, decoded);
}

// The result is valid until the next call in this thread.
Content read(std::span<const std::byte> bytes, int64_t numel) {
  check(!bytes.empty() && numel > 0 && numel <= kGrain);
  const auto flags = static_cast<uint8_t>(bytes[0]), kind = static_cast<uint8_t>(flags & 3);
  if (kind == kConstant) return read_constant(bytes);
  check(kind == kFixed || kind == kCoded);
  thread_local Decoded decoded;
  const size_t room = (numel + 15) / 16 * 16;
  if (decoded.symbols.size() < room) decoded.symbols.resize(room), decoded.low.resize(room);
  std::fill(decoded.symbols.begin() + numel, decoded.symbols.begin() + room, 0);
  decoded.extra.clear();
  decoded.grid = {.dithered = (flags & kDithered) != 0};
  bytes = read_grid(bytes, &decoded.grid);
  if (kind == kCoded) {
    read_coded(bytes, numel, flags, &decoded);
  } else {
    check((flags & 0x60) == 0);
    read_fixed(bytes, numel, (flags >> 2 & 7) + 1, &decoded);
  }
  return {.grid = decoded.grid,
          .symbols = decoded.symbols.data(),
          .low = decoded.low.data(),
          .extra = decoded.extra.data()};
}

// ---- the codec ----

class Entropy final : public Codec {
 public:
  explicit Entropy(int64_t rate) : rate_(rate) {}

  int64_t grain() const override { return kGrain; }
  int64_t cut() const override { return kCut; }

  int64_t max_bytes(int64_t numel) const override {
    const int64_t rest = numel % kGrain;
    return numel / kGrain * most_entropy_bytes(kGrain, rate_) +
           (rest > 0 ? most_entropy_bytes(rest, rate_) : 0);
  }

  int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t first_index,
                 const Rounding& rounding, std::byte* bytes) const override {
    Content content;
    return encode_floats(as_floats(dtype, values, numel), numel, first_index, rounding, bytes,
                         &content);
  }

  // Restores values from the symbols, without decoding the stream.
  int64_t encode_keeping(const float* values, int64_t numel, int64_t first_index,
                         const Rounding& rounding, std::byte* bytes, float* errors) const override {
    Content content;
    const int64_t length = encode_floats(values, numel, first_index, rounding, bytes, &content);
    content.for_chunks(numel, [&](int64_t first, int64_t count, const float* decoded) {
      kernels().subtract(values + first, decoded, errors + first, count);
    });
    return length;
  }

  void decode(std::span<const std::byte> bytes, int64_t numel, int64_t /*first_index*/, Dtype dtype,
              void* values) const override {
    if (numel == 0 && bytes.empty()) return;
    const Content content = read(bytes, numel);
    if (dtype == Dtype::kFloat32 && content.symbols != nullptr) {
      kernels().entropy_values(content.symbols, content.low, content.extra, numel, /*first=*/0,
                               content.grid, static_cast<float*>(values));
      return;
    }
    auto* const to = static_cast<std::byte*>(values);
    content.for_chunks(numel, [&](int64_t first, int64_t count, const float* decoded) {
      kernels().convert(Dtype::kFloat32, decoded, dtype, to + first * size_of(dtype), count);
    });
  }

  void decode_add(std::span<const std::byte> bytes, int64_t numel, int64_t /*first_index*/,
                  const float* base, float* sum) const override {
    if (numel == 0 && bytes.empty()) return;
    read(bytes, numel).for_chunks(numel, [&](int64_t first, int64_t count, const float* decoded) {
      kernels().add(Dtype::kFloat32, decoded, base + first, sum + first, count);
    });
  }

 private:
  int64_t encode_floats(const float* values, int64_t numel, int64_t first_index,
                        const Rounding& rounding, std::byte* bytes, Content* content) const {
    if (numel == 0) return 0;
    bool same;
    const uint32_t largest = kernels().survey(values, numel, &same);
    if (same) std::memcpy(&content->value, values, sizeof(float));  // values may be unaligned
    if (largest >= 0x7f800000) content->value = std::bit_cast<float>(kFloat32Nan);
    if (largest == 0) content->value = 0;
    if (same || largest == 0 || largest >= 0x7f800000) return write_constant(content->value, bytes);
    const bool dithered = rounding.mode == RoundingMode::kShift;
    const uint16_t dither = dithered ? noise_of(first_index, rounding) : 0;
    if (const int width = fixed_width(numel, rate_); width > 0) {
      const int64_t length = write_fixed(values, numel, largest, width,
                                         {.dithered = dithered, .dither = dither}, bytes);
      *content = read({bytes, static_cast<size_t>(length)}, numel);
      return length;
    }
    return encode_coded(values, numel, largest, dithered, dither, bytes, content);
  }

  int64_t encode_coded(const float* values, int64_t numel, uint32_t largest, bool dithered,
                       uint16_t dither, std::byte* bytes, Content* content) const {
    thread_local EntropyLevels levels;
    thread_local std::vector<std::byte> block;
    EntropySearch search(values, numel, largest, rate_, dithered, 8 * wanted_bytes(numel, rate_),
                         8 * (24 + 3 * lanes_of(numel)));
    int64_t key = search.run(levels, [&](const EntropyLevels& found) {
      return size_of_block(found, numel, search.grid(kLowestKey));
    });
    // Longer moves could pass all steps with which an outlier is not 0.
    for (int64_t move = kOctave / 64;; move = std::min(2 * move, kOctave)) {
      EntropyGrid grid = search.grid(key);
      grid.dither = dither;
      if (!dithered) grid.shift = static_cast<float>(search.shift_at(key)) / 256;
      if (dithered || key != search.encoded()) levels.encode(values, numel, 16, grid);
      const int64_t length = write_coded(levels, numel, grid, block);
      if (length <= most_entropy_bytes(numel, rate_)) {
        std::memcpy(bytes, block.data(), length);
        *content = {.grid = grid,
                    .symbols = levels.symbols.data(),
                    .low = levels.low.data(),
                    .extra = levels.extra.data()};
        return length;
      }
      if (key >= search.highest()) return write_constant(0, bytes);
      key = std::min(key + move, search.highest());
    }
  }

  const int64_t rate_;
};

}  // namespace

std::unique_ptr<Codec> make_entropy(const CodecSettings& settings) {
  return std::make_unique<Entropy>(settings.rate);
}

}  // namespace cgx
