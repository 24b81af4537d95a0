#include "compressor/lossless.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "base/status.h"
#include "compressor/frequencies.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

constexpr int64_t kBlock = 16384;  // values of a message: 32 KiB in 16 bits
constexpr int kMostPlanes = 4;
constexpr int64_t kLengthBytes = 4;
// A plane other than that of the exponents is coded only if a sample of it would take less.
constexpr int64_t kSample = 1024;
constexpr int64_t kMostSampleBits = 7 * (int64_t{1} << kCostBits) + (int64_t{1} << (kCostBits - 1));

// More lanes than by default: exponents take few bits, but a message is short.
int lanes_of(int64_t numel) { return rans_lanes(4 * numel); }

// Memory for a block. Thread-local memory is valid within one call only.
struct Scratch {
  std::vector<std::byte> values = std::vector<std::byte>(kBlock * kMostPlanes);
  std::vector<uint8_t> planes = std::vector<uint8_t>(kBlock * kMostPlanes);
  std::vector<std::byte> stream =
      std::vector<std::byte>(kMostFrequencyBytes + most_rans_bytes(kBlock, kMostRansLanes));

  static Scratch& get() {
    thread_local Scratch scratch;
    return scratch;
  }
};

void check_numel(int64_t numel) {
  require(numel <= kBlock, CGX_INTERNAL, numel, " values in one lossless block");
}

// ---- planes ----

Counts sample_of(const uint8_t* plane, int64_t numel) {
  Counts counts{};
  const int64_t step = std::max<int64_t>(1, numel / kSample);
  for (int64_t i = 0; i < numel; i += step) ++counts[plane[i]];
  return counts;
}

bool promising(const uint8_t* plane, int64_t numel) {
  const Counts counts = sample_of(plane, numel);
  int64_t total = 0;
  for (const uint32_t count : counts) total += count;
  return cost_of(counts, frequencies_of(counts)) < kMostSampleBits * total;
}

// Codes a plane: its frequencies, then the stream. Returns the size, or `numel` if it would not be
// less.
int64_t encode_plane(const uint8_t* plane, int64_t numel, std::byte* bytes) {
  Counts counts;
  kernels().count_symbols(plane, numel, counts.data());
  const Frequencies frequencies = frequencies_of(counts);
  if (cost_of(counts, frequencies) >= (8 * numel) << kCostBits) return numel;
  const int64_t table = write_frequencies(frequencies, bytes);
  const int64_t stream =
      kernels().rans_encode(plane, numel, lanes_of(numel), frequencies.data(), bytes + table);
  return std::min(table + stream, numel);
}

void decode_plane(std::span<const std::byte> bytes, int64_t numel, uint8_t* plane) {
  Frequencies frequencies;
  const auto table = static_cast<size_t>(read_frequencies(bytes, kSymbols, frequencies));
  require(kernels().rans_decode(bytes.data() + table, static_cast<int64_t>(bytes.size() - table),
                                numel, lanes_of(numel), frequencies.data(), plane),
          CGX_INVALID_ARGUMENT, "the stream of ", numel, " symbols is not valid");
}

// ---- blocks ----

class Lossless final : public Codec {
 public:
  explicit Lossless(Dtype wire) : wire_(wire) {}

  int64_t grain() const override { return kBlock; }
  // Beyond, a table that fits one segment saves more than sharing it.
  int64_t packs_below() const override { return 4096; }
  int64_t max_bytes(int64_t numel) const override {
    return numel * width() + numel / kBlock + (numel % kBlock != 0);
  }

  int64_t encode(Dtype dtype, const void* values, int64_t numel, int64_t /*first_index*/,
                 const Rounding& /*rounding*/, std::byte* bytes) const override {
    check_numel(numel);
    if (numel == 0) return 0;
    Scratch& scratch = Scratch::get();
    if (dtype != wire_) {
      kernels().convert(dtype, values, wire_, scratch.values.data(), numel);
      values = scratch.values.data();
    }
    uint8_t* planes[kMostPlanes];
    for (int p = 0; p < width(); ++p) planes[p] = scratch.planes.data() + p * kBlock;
    kernels().split_planes(width(), values, numel, planes);
    unsigned coded = 0;
    std::byte* to = bytes + 1;
    for (int p = 0; p < width(); ++p) {
      int64_t length = numel;
      if (p == 0 || promising(planes[p], numel))
        length = encode_plane(planes[p], numel, scratch.stream.data());
      if (length + kLengthBytes >= numel) {
        std::memcpy(to, planes[p], numel);
        to += numel;
        continue;
      }
      coded |= 1u << p;
      const auto length32 = static_cast<uint32_t>(length);
      std::memcpy(to, &length32, kLengthBytes);
      std::memcpy(to + kLengthBytes, scratch.stream.data(), length);
      to += kLengthBytes + length;
    }
    bytes[0] = static_cast<std::byte>(coded);
    if (coded == 0) std::memcpy(bytes + 1, values, numel * width());
    return to - bytes;
  }

  void decode(std::span<const std::byte> bytes, int64_t numel, int64_t /*first_index*/, Dtype dtype,
              void* values) const override {
    check_numel(numel);
    if (dtype == wire_) return decode_wire(bytes, numel, values);
    std::byte* const decoded = Scratch::get().values.data();
    decode_wire(bytes, numel, decoded);
    kernels().convert(wire_, decoded, dtype, values, numel);
  }

  void decode_add(std::span<const std::byte> bytes, int64_t numel, int64_t /*first_index*/,
                  const float* base, float* sum) const override {
    check_numel(numel);
    std::byte* const decoded = Scratch::get().values.data();
    decode_wire(bytes, numel, decoded);
    kernels().add(wire_, decoded, base, sum, numel);
  }

 private:
  int64_t width() const { return size_of(wire_); }

  void decode_wire(std::span<const std::byte> bytes, int64_t numel, void* values) const {
    const auto require_length = [](bool condition) {
      require(condition, CGX_INVALID_ARGUMENT, "the lengths of a lossless block are not valid");
    };
    require_length(!bytes.empty() == (numel > 0));
    if (numel == 0) return;
    const auto coded = static_cast<unsigned>(bytes[0]);
    bytes = bytes.subspan(1);
    require(coded >> width() == 0, CGX_INVALID_ARGUMENT, "a lossless block has the flags ", coded);
    if (coded == 0) {
      require_length(static_cast<int64_t>(bytes.size()) == numel * width());
      std::memcpy(values, bytes.data(), bytes.size());
      return;
    }
    const uint8_t* planes[kMostPlanes];
    for (int p = 0; p < width(); ++p) {
      const bool is_coded = coded >> p & 1;
      uint32_t length = static_cast<uint32_t>(numel);
      if (is_coded) {
        require_length(bytes.size() >= kLengthBytes);
        std::memcpy(&length, bytes.data(), kLengthBytes);
        bytes = bytes.subspan(kLengthBytes);
      }
      require_length(length <= bytes.size());
      const auto part = bytes.first(length);
      bytes = bytes.subspan(length);
      planes[p] = reinterpret_cast<const uint8_t*>(part.data());
      if (!is_coded) continue;
      uint8_t* const plane = Scratch::get().planes.data() + p * kBlock;
      decode_plane(part, numel, plane);
      planes[p] = plane;
    }
    require_length(bytes.empty());
    kernels().join_planes(width(), planes, numel, values);
  }

  const Dtype wire_;
};

}  // namespace

std::unique_ptr<Codec> make_lossless(const CodecSettings& settings) {
  return std::make_unique<Lossless>(settings.dtype);
}

}  // namespace cgx
