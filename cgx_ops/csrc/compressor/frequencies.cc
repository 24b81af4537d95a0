#include "compressor/frequencies.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

#include "base/status.h"
#include "compressor/bit_fields.h"

namespace cgx {
namespace {

// The costs of all frequencies. The logarithm's bits come from repeated squaring.
std::array<uint32_t, kFrequencySum + 1> make_costs() {
  std::array<uint32_t, kFrequencySum + 1> costs{};
  for (uint32_t f = 1; f <= kFrequencySum; ++f) {
    const int whole = std::bit_width(f) - 1;
    uint32_t logarithm = whole;
    uint64_t power = uint64_t{f} << (31 - whole);  // at least 1, below 2, in units of 2^-31
    for (int bit = 0; bit < kCostBits; ++bit) {
      power = power * power >> 31;
      const uint32_t carry = static_cast<uint32_t>(power >> 32);
      logarithm = logarithm << 1 | carry;
      power >>= carry;
    }
    costs[f] = (uint32_t{kFrequencyBits} << kCostBits) - logarithm;
  }
  return costs;
}

const std::array<uint32_t, kFrequencySum + 1>& costs() {
  static const auto costs = make_costs();
  return costs;
}

// ---- bits of written frequencies ----

constexpr int kFirstWidth = 8;  // the expected width of the first frequency
// The code of symbols without a frequency; codes of differences from it on are 1 more.
constexpr int kAbsent = 4;

// The number of bits of a frequency's offset from the lowest one of its width. `remaining`: the sum
// of this frequency and of those that follow.
int offset_bits(int width, uint32_t remaining) {
  const uint32_t lowest = 1u << (width - 1);
  return std::bit_width(std::min(lowest - 1, remaining - lowest));
}

// Writes a positive number in Elias's gamma code: zeros, as many as bits follow the number's first.
void put_gamma(uint32_t number, BitPacker& packer) {
  const int zeros = std::bit_width(number) - 1;
  packer.put(1u << zeros, zeros + 1);
  packer.put(number - (1u << zeros), zeros);
}

// Bits after the end are 0, so compare used_bytes() with the size.
class BitReader {
 public:
  explicit BitReader(std::span<const std::byte> from) : from_(from) {}
  uint32_t take(int bits) {
    uint32_t value = 0;
    for (int bit = 0; bit < bits; ++bit, ++at_)
      if (at_ / 8 < from_.size())
        value |= (static_cast<uint32_t>(from_[at_ / 8]) >> (at_ % 8) & 1) << bit;
    return value;
  }
  // Returns 0 if the number is 512 or larger.
  int take_gamma() {
    int zeros = 0;
    while (zeros <= 8 && take(1) == 0) ++zeros;
    return zeros <= 8 ? 1 << zeros | static_cast<int>(take(zeros)) : 0;
  }
  size_t used_bytes() const { return (at_ + 7) / 8; }
  uint32_t padding() { return take(static_cast<int>(8 * used_bytes() - at_)); }

 private:
  std::span<const std::byte> from_;
  size_t at_ = 0;
};

}  // namespace

uint32_t cost_of(int frequency) { return costs()[frequency]; }

int64_t cost_of(const Counts& counts, const Frequencies& frequencies) {
  const auto& cost = costs();
  int64_t sum = 0;
  for (int s = 0; s < kSymbols; ++s)
    if (counts[s] != 0) sum += int64_t{counts[s]} * cost[frequencies[s]];
  return sum;
}

Frequencies frequencies_of(const Counts& counts) {
  const auto& cost = costs();
  uint64_t total = 0;
  for (const uint32_t count : counts) total += count;
  Frequencies frequencies{};
  int64_t missing = kFrequencySum;
  for (int s = 0; s < kSymbols; ++s) {
    if (counts[s] == 0) continue;
    frequencies[s] = std::max<uint64_t>(1, uint64_t{counts[s]} * kFrequencySum / total);
    missing -= frequencies[s];
  }
  // Change by 1 the frequency for which this lowers the cost most, or raises it least.
  const int step = missing > 0 ? 1 : -1;
  using Change = std::pair<int64_t, int>;  // of the cost, and the symbol
  std::priority_queue<Change, std::vector<Change>, std::greater<>> changes;
  const auto add = [&](int s) {
    const int f = frequencies[s];
    if (f + step == 0) return;
    changes.emplace((int64_t{cost[f + step]} - cost[f]) * counts[s], s);
  };
  if (missing != 0)
    for (int s = 0; s < kSymbols; ++s)
      if (counts[s] != 0) add(s);
  for (; missing != 0; missing -= step) {
    const int s = changes.top().second;
    changes.pop();
    frequencies[s] += step;
    if (missing != step) add(s);
  }
  return frequencies;
}

int64_t write_frequencies(const Frequencies& frequencies, std::byte* bytes) {
  int s = 0;
  while (frequencies[s] == 0) ++s;
  BitPacker packer(bytes);
  packer.put(s, 8);
  int width = kFirstWidth;
  for (uint32_t remaining = kFrequencySum; remaining != 0; ++s) {
    int absent = 0;
    for (; frequencies[s] == 0; ++s) ++absent;
    if (absent > 0) {
      put_gamma(kAbsent, packer);
      put_gamma(absent, packer);
    }
    const uint32_t frequency = frequencies[s];
    const int difference = std::bit_width(frequency) - width;
    const int code = difference < 0 ? -2 * difference : 2 * difference + 1;
    put_gamma(code < kAbsent ? code : code + 1, packer);
    width += difference;
    packer.put(frequency - (1u << (width - 1)), offset_bits(width, remaining));
    remaining -= frequency;
  }
  return packer.finish() - bytes;
}

int64_t read_frequencies(std::span<const std::byte> bytes, int alphabet, Frequencies& frequencies) {
  const auto valid = [](bool condition) {
    require(condition, CGX_INVALID_ARGUMENT, "the frequencies of symbols are not valid");
  };
  frequencies.fill(0);
  BitReader reader(bytes);
  int s = static_cast<int>(reader.take(8));
  int width = kFirstWidth;
  for (uint32_t remaining = kFrequencySum; remaining != 0; ++s) {
    int code = reader.take_gamma();
    if (code == kAbsent && remaining != kFrequencySum) {
      const int absent = reader.take_gamma();
      valid(absent != 0);
      s += absent;
      code = reader.take_gamma();
    }
    valid(s < alphabet && code != 0 && code != kAbsent);
    if (code > kAbsent) --code;
    width += code % 2 == 0 ? -code / 2 : code / 2;
    valid(width >= 1 && width <= static_cast<int>(std::bit_width(remaining)));
    const uint32_t frequency = (1u << (width - 1)) + reader.take(offset_bits(width, remaining));
    valid(frequency <= remaining);
    frequencies[s] = static_cast<uint16_t>(frequency);
    remaining -= frequency;
  }
  valid(reader.padding() == 0 && reader.used_bytes() <= bytes.size());
  return static_cast<int64_t>(reader.used_bytes());
}

}  // namespace cgx
