// Levels of the compressor `entropy`, sixteen values at a time (docs/reference/entropy_blocks.md).
// Values far from 0 have extra bits. They are rare, so their groups take a scalar path.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel/cpu/vectors-inl.h"
#include "kernel/entropy.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

// ---- 1. a survey of the values ----

// Returns the bits of the largest magnitude, and whether all values have the same bits.
uint32_t survey(const float* from, int64_t n, bool* same) {
  const auto* __restrict values = reinterpret_cast<const Stored<uint32_t>*>(from);
  uint32_t largest = 0, differences = 0;
  const uint32_t first = n > 0 ? values[0].value : 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = values[i].value, magnitude = bits & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
    differences |= bits ^ first;
  }
  *same = differences == 0;
  return largest;
}

// ---- 2. values -> levels -> symbols ----

// The noise r of sixteen values.
class Dither {
 public:
  explicit Dither(const EntropyGrid& grid) : dither_(grid.dither) {
    static constexpr int32_t kSteps[kSixteen] = {
        0 * 0x9e37,  1 * 0x9e37,  2 * 0x9e37,  3 * 0x9e37, 4 * 0x9e37,  5 * 0x9e37,
        6 * 0x9e37,  7 * 0x9e37,  8 * 0x9e37,  9 * 0x9e37, 10 * 0x9e37, 11 * 0x9e37,
        12 * 0x9e37, 13 * 0x9e37, 14 * 0x9e37, 15 * 0x9e37};
    steps_ = load_registers<Ints16>(kSteps);
  }
  // `at`: the position of the first one in its block.
  [[gnu::always_inline]] Floats16 at(int64_t at) const {
    const auto first =
        static_cast<int32_t>((dither_ + kDitherStep * static_cast<uint32_t>(at)) % 65536);
    return map<Floats16>(steps_, [&](Ints steps) {
      const Ints u = (steps + first) & 0xffff;
      return (__builtin_convertvector(u, Floats) + 0.5f) * (1.0f / 65536);  // exact
    });
  }

 private:
  uint32_t dither_;
  Ints16 steps_;
};

struct Levels16 {
  Ints16 levels;
  Ints16 exact;  // -1: the value is sent exactly, and its level is 0
};

template <bool kDithered>
[[gnu::always_inline]] inline Levels16 levels_of(const Floats16& x, float inverse, float offset,
                                                 const Floats16& noise) {
  Levels16 out;
#pragma GCC unroll 4
  for (int i = 0; i < kRegisters; ++i) {
    const Ints bits = Ints(x.at[i]);
    if constexpr (kDithered) {
      Floats v = x.at[i] * inverse + noise.at[i];
      const Ints fits = Ints(Floats(Ints(v) & 0x7fffffff) < kMostLevel);
      v = Floats(Ints(v) & fits);
      const Ints whole = __builtin_convertvector(v, Ints);
      out.levels.at[i] = whole + Ints(__builtin_convertvector(whole, Floats) > v);  // floor
      out.exact.at[i] = ~fits;
    } else {
      Floats v = Floats(bits & 0x7fffffff) * inverse + offset;
      const Ints fits = Ints(v < kMostLevel);
      v = Floats(Ints(v) & fits);
      const Ints level = __builtin_convertvector(v, Ints), sign = bits >> 31;
      out.levels.at[i] = (level ^ sign) - sign;
      out.exact.at[i] = ~fits;
    }
  }
  return out;
}

[[gnu::always_inline]] inline bool any(const Ints16& mask) {
  Ints all = mask.at[0];
#pragma GCC unroll 4
  for (int i = 1; i < kRegisters; ++i) all |= mask.at[i];
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(__m512i(all), __m512i(all)) != 0;
#elif defined(__AVX2__)
  return _mm256_testz_si256(__m256i(all), __m256i(all)) == 0;
#else
  uint64_t words[2];
  __builtin_memcpy(words, &all, sizeof(all));
  return (words[0] | words[1]) != 0;
#endif
}

// Writes the symbols of a group with values far from 0, and returns the next extra bits.
[[gnu::noinline]] uint32_t* far_symbols(const Floats16& x, const Ints16& z, const Ints16& exact,
                                        uint8_t* symbols, uint32_t* extra) {
  alignas(64) uint32_t bits[kSixteen], levels[kSixteen], exacts[kSixteen];
  store_registers(x, bits);
  store_registers(z, levels);
  store_registers(exact, exacts);
  for (int i = 0; i < kSixteen; ++i) {
    const uint32_t level = levels[i];
    if (exacts[i] != 0) {
      symbols[i] = kExactSymbol;
      *extra++ = bits[i];
    } else if (level < kDirectSymbols) {
      symbols[i] = static_cast<uint8_t>(level);
    } else {
      const int more = 30 - __builtin_clz(level);  // bits below the highest two
      symbols[i] = static_cast<uint8_t>(kDirectSymbols + 2 * (more - 5) + (level >> more & 1));
      *extra++ = level & ((1u << more) - 1);
    }
  }
  return extra;
}

template <bool kDithered, bool kHasLow>
int64_t entropy_symbols_as(const float* from, int64_t n, int64_t stride, const EntropyGrid& grid,
                           uint8_t* symbols, uint8_t* low, uint32_t* extra) {
  const auto* values = reinterpret_cast<const Stored<uint32_t>*>(from);
  const float inverse = 1.0f / grid.step;
  const int width = kHasLow ? grid.width : 0;
  const Dither dither(grid);
  uint32_t* next = extra;
  for (int64_t i = 0; i < n; i += kSixteen) {
    const Floats16 x = n - i >= kSixteen
                           ? load16<Float32>(values + i)
                           : load_last<Float32>(values + i, static_cast<int>(n - i), 0.0f);
    Floats16 noise{};
    if constexpr (kDithered) noise = dither.at(i / kSixteen * stride);
    const Levels16 found = levels_of<kDithered>(x, inverse, grid.offset, noise);
    const Ints16 z = map<Ints16>(found.levels, [&](Ints level) {
      const Ints high = level >> width;
      return high << 1 ^ high >> 31;
    });
    if (width > 0) {
      const Ints16 rest =
          map<Ints16>(found.levels, [&](Ints level) { return level & ((1 << width) - 1); });
      const TwoWords bytes = bytes_of_ints(rest);
      __builtin_memcpy(low + i, &bytes, sizeof(bytes));
    }
    Ints16 far;
    for (int j = 0; j < kRegisters; ++j)
      far.at[j] = (z.at[j] & ~(kDirectSymbols - 1)) | found.exact.at[j];
    if (any(far)) [[unlikely]] {
      next = far_symbols(x, z, found.exact, symbols + i, next);
    } else {
      const TwoWords bytes = bytes_of_ints(z);
      __builtin_memcpy(symbols + i, &bytes, sizeof(bytes));
    }
  }
  return next - extra;
}

int64_t entropy_symbols(const float* values, int64_t n, int64_t stride, const EntropyGrid& grid,
                        uint8_t* symbols, uint8_t* low, uint32_t* extra) {
  const auto run = grid.width > 0  ? grid.dithered ? entropy_symbols_as<true, true>
                                                   : entropy_symbols_as<false, true>
                   : grid.dithered ? entropy_symbols_as<true, false>
                                   : entropy_symbols_as<false, false>;
  return run(values, n, stride, grid, symbols, low, extra);
}

// ---- 3. counts ----

// Compares eight symbols at a time with whole registers, from symbol 0 on. Most symbols of a block
// are low, so this takes less time than a histogram.
typedef uint8_t Bytes __attribute__((vector_size(sizeof(Ints))));

void count_low_symbols(const uint8_t* symbols, int64_t n, uint32_t* counts) {
  constexpr int64_t kBytes = sizeof(Bytes);
  constexpr int kTogether = 8;
  __builtin_memset(counts, 0, 256 * sizeof(uint32_t));
  int64_t at = 0;
  while (n - at >= kBytes) {
    const int64_t registers = (n - at) / kBytes < 255 ? (n - at) / kBytes : 255;
    const uint8_t* const from = symbols + at;
    int64_t rest = registers * kBytes;
    at += rest;
    int first = 0;
    for (; first < 64 && rest > registers; first += kTogether) {
      Bytes found[kTogether] = {};
      for (int64_t i = 0; i < registers; ++i) {
        Bytes bytes;
        __builtin_memcpy(&bytes, from + i * kBytes, kBytes);
#pragma GCC unroll 8
        for (int s = 0; s < kTogether; ++s)
          found[s] -= Bytes(bytes == static_cast<uint8_t>(first + s));
      }
      for (int s = 0; s < kTogether; ++s) {
        uint8_t lanes[kBytes];
        __builtin_memcpy(lanes, &found[s], kBytes);
        uint32_t sum = 0;
        for (const uint8_t lane : lanes) sum += lane;
        counts[first + s] += sum;
        rest -= sum;
      }
    }
    // The others are rare, or beyond the symbols of single levels.
    for (int64_t i = 0; i < registers && rest > 0; ++i) {
      uint64_t words[sizeof(Bytes) / 8], any = 0;
      Bytes bytes;
      __builtin_memcpy(&bytes, from + i * kBytes, kBytes);
      const Bytes high = Bytes(bytes >= static_cast<uint8_t>(first));
      __builtin_memcpy(words, &high, sizeof(high));
      for (const uint64_t word : words) any |= word;
      if (any == 0) continue;
      for (int64_t j = i * kBytes; j < (i + 1) * kBytes; ++j)
        if (from[j] >= first) ++counts[from[j]], --rest;
    }
  }
  for (; at < n; ++at) ++counts[symbols[at]];
}

// ---- 4. symbols -> levels -> values ----

// Replaces symbols of levels far from 0 by twice those levels (with sign); returns the next extra
// bits.
[[gnu::noinline]] const uint32_t* far_levels(Ints16* z, const uint32_t* extra) {
  alignas(64) uint32_t levels[kSixteen];
  store_registers(*z, levels);
  for (uint32_t& level : levels) {
    if (level < kDirectSymbols) continue;
    const uint32_t bits = *extra++, symbol = level;
    level = symbol == kExactSymbol ? 0 : (2 + symbol % 2) << extra_bits_of(symbol) | bits;
  }
  *z = load_registers<Ints16>(levels);
  return extra;
}

template <bool kDithered>
int64_t entropy_values_as(const uint8_t* symbols, const uint8_t* low, const uint32_t* extra,
                          int64_t n, int64_t first, const EntropyGrid& grid, float* to) {
  auto* values = reinterpret_cast<Stored<uint32_t>*>(to);
  const int width = grid.width;
  const float step = grid.step, shift = grid.shift;
  const Floats largest = Floats{} + 3.40282347e38f;
  const Dither dither(grid);
  const uint32_t* next = extra;
  for (int64_t i = 0; i < n; i += kSixteen) {
    const int count = n - i < kSixteen ? static_cast<int>(n - i) : kSixteen;
    TwoWords bytes;
    __builtin_memcpy(&bytes, symbols + i, sizeof(bytes));
    Ints16 z = ints_of_bytes(bytes);
    const uint64_t top = 0xc0c0c0c0c0c0c0c0;  // of symbols that are not direct
    const uint32_t* const before = next;
    const bool far = ((bytes.at[0] | bytes.at[1]) & top) != 0;
    if (far) [[unlikely]]
      next = far_levels(&z, next);
    Ints16 levels = map<Ints16>(z, [&](Ints code) { return (code >> 1 ^ -(code & 1)) << width; });
    if (width > 0) {
      __builtin_memcpy(&bytes, low + i, sizeof(bytes));
      const Ints16 rest = ints_of_bytes(bytes);
      for (int j = 0; j < kRegisters; ++j) levels.at[j] |= rest.at[j];
    }
    Floats16 out;
    if constexpr (kDithered) {
      const Floats16 noise = dither.at(first + i);
      for (int j = 0; j < kRegisters; ++j) {
        Floats x = (__builtin_convertvector(levels.at[j], Floats) + (0.5f - noise.at[j])) * step;
        x = x < largest ? x : largest;
        out.at[j] = x > -largest ? x : -largest;
      }
    } else {
      out = map<Floats16>(levels, [&](Ints level) {
        const Ints sign = level >> 31;
        Floats x = (__builtin_convertvector((level ^ sign) - sign, Floats) - shift) * step;
        x = x < largest ? x : largest;
        return Floats((Ints(x) | (sign & INT32_MIN)) & Ints(level != 0));
      });
    }
    store_some<Float32>(out, count, values + i);
    if (far) [[unlikely]] {
      const uint32_t* from = before;
      for (int j = 0; j < count; ++j) {
        if (symbols[i + j] == kExactSymbol) values[i + j].value = *from;
        from += symbols[i + j] >= kDirectSymbols;
      }
    }
  }
  return next - extra;
}

int64_t entropy_values(const uint8_t* symbols, const uint8_t* low, const uint32_t* extra, int64_t n,
                       int64_t first, const EntropyGrid& grid, float* values) {
  return grid.dithered ? entropy_values_as<true>(symbols, low, extra, n, first, grid, values)
                       : entropy_values_as<false>(symbols, low, extra, n, first, grid, values);
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
