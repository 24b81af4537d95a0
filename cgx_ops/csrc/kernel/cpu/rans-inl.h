// The entropy coder: histograms, and rANS with interleaved lanes (Giesen, "Interleaved entropy
// coders", 2014). docs/reference/entropy_coding.md defines the bytes.
//
//   1. histogram
//   2. tables of the encoder and of the decoder
//   3. one symbol
//   4. a symbol per lane, in vector registers
//   5. streams
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel/cpu/vectors-inl.h"
#include "kernel/rans.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

// ---- 1. histogram ----

// Several histograms, because repeated symbols would wait for the previous store.
void count_symbols(const uint8_t* symbols, int64_t numel, uint32_t* counts) {
  constexpr int kParts = 4;
  uint32_t parts[kParts][kSymbols] = {};
  int64_t i = 0;
  for (; i + 8 <= numel; i += 8) {
    uint64_t word;
    __builtin_memcpy(&word, symbols + i, 8);
    for (int j = 0; j < 8; ++j) ++parts[j % kParts][(word >> 8 * j) & 0xff];
  }
  for (; i < numel; ++i) ++parts[0][symbols[i]];
  for (int s = 0; s < kSymbols; ++s) {
    counts[s] = 0;
    for (const auto& part : parts) counts[s] += part[s];
  }
}

// ---- 2. tables ----

constexpr uint32_t kLowestState = 1u << 15;

// state / frequency = (state * reciprocal >> 32) >> shift for all states below frequency << 19, by
// Granlund and Montgomery's theorem, because frequency^2 <= 2^(13 + shift). A frequency of 1 gives
// state - 1 instead, for which the bias compensates.
struct EncoderTable {
  uint32_t reciprocal[kSymbols];
  uint32_t rest[kSymbols];  // frequency (13 bits), bias (13 bits), shift (4 bits)

  explicit EncoderTable(const uint16_t* frequencies) {
    uint32_t start = 0;
    for (int s = 0; s < kSymbols; ++s) {
      const uint32_t frequency = frequencies[s];
      uint32_t bias = start, shift = 0, inverse = 0xffffffff;
      if (frequency == 1) bias += kFrequencySum - 1;
      if (frequency > 1) {
        shift = 31 - __builtin_clz(frequency - 1);
        inverse =
            static_cast<uint32_t>(((uint64_t{1} << (32 + shift)) + frequency - 1) / frequency);
      }
      reciprocal[s] = inverse;
      rest[s] = frequency | bias << 13 | shift << 26;
      start += frequency;
    }
  }
};

// An entry per slot: symbol (the top 8 bits), frequency - 1 (12 bits), slot - start (12 bits).
struct DecoderTable {
  uint32_t at[kFrequencySum];

  explicit DecoderTable(const uint16_t* frequencies) {
    uint32_t* slot = at;
    for (uint32_t s = 0; s < kSymbols; ++s) {
      const uint32_t frequency = frequencies[s], entry = s << 24 | (frequency - 1) << 12;
      for (uint32_t i = 0; i < frequency; ++i) slot[i] = entry + i;
      slot += frequency;
    }
  }
};

// ---- 3. one symbol ----

[[gnu::always_inline]] inline void put_symbol(const EncoderTable& table, uint8_t symbol,
                                              uint32_t& state, Stored<uint16_t>*& words) {
  const uint32_t rest = table.rest[symbol], frequency = rest & 0x1fff;
  if (state > (frequency << 19) - 1) {
    (--words)->value = static_cast<uint16_t>(state);
    state >>= 16;
  }
  const auto quotient =
      static_cast<uint32_t>(uint64_t{state} * table.reciprocal[symbol] >> 32) >> (rest >> 26);
  state += quotient * (kFrequencySum - frequency) + (rest >> 13 & 0x1fff);
}

// Returns false if a word is missing.
[[gnu::always_inline]] inline bool take_symbol(const DecoderTable& table, uint32_t& state,
                                               const Stored<uint16_t>*& words,
                                               const Stored<uint16_t>* end, uint8_t& symbol) {
  const uint32_t entry = table.at[state % kFrequencySum], upper = state >> kFrequencyBits;
  symbol = static_cast<uint8_t>(entry >> 24);
  state = upper * (entry >> 12 & 0xfff) + upper + (entry & 0xfff);
  if (state < kLowestState) {
    if (words == end) return false;
    state = state << 16 | (words++)->value;
  }
  return true;
}

// ---- 4. vector registers ----

#if defined(__AVX2__)

// For each mask of eight lanes, bytes of pshufb that move ...
struct Shuffles {
  // ... the first words to the lanes of the mask, and 0 to the others.
  alignas(16) int8_t expand[256][16];
  // ... the words of the lanes of the mask to the end.
  alignas(16) int8_t compress[256][16];

  constexpr Shuffles() : expand(), compress() {
    for (int mask = 0; mask < 256; ++mask) {
      int next = 0, last = 8;
      for (int lane = 0; lane < 8; ++lane) {
        const bool set = mask >> lane & 1;
        expand[mask][2 * lane] = static_cast<int8_t>(set ? 2 * next : -1);
        expand[mask][2 * lane + 1] = static_cast<int8_t>(set ? 2 * next + 1 : -1);
        next += set;
      }
      for (int lane = 7; lane >= 0; --lane) {
        if ((mask >> lane & 1) == 0) continue;
        --last;
        compress[mask][2 * last] = static_cast<int8_t>(2 * lane);
        compress[mask][2 * last + 1] = static_cast<int8_t>(2 * lane + 1);
      }
    }
  }
};
constexpr Shuffles kShuffles;

[[gnu::always_inline]] inline __m128i load_half(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}

// Eight 32-bit lanes with AVX2.
struct Eight {
  using Vector = __m256i;
  static constexpr int kCount = 8;

  [[gnu::always_inline]] static Vector load(const uint32_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const Vector*>(from));
  }
  [[gnu::always_inline]] static void store(Vector v, uint32_t* to) {
    _mm256_storeu_si256(reinterpret_cast<Vector*>(to), v);
  }
  [[gnu::always_inline]] static Vector load_bytes(const uint8_t* from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
  [[gnu::always_inline]] static Vector put(const EncoderTable& table, Vector symbols, Vector x,
                                           Stored<uint16_t>*& words) {
    const Vector rest =
        _mm256_i32gather_epi32(reinterpret_cast<const int*>(table.rest), symbols, 4);
    const Vector reciprocal =
        _mm256_i32gather_epi32(reinterpret_cast<const int*>(table.reciprocal), symbols, 4);
    const Vector frequency = _mm256_and_si256(rest, _mm256_set1_epi32(0x1fff));
    const Vector most = _mm256_sub_epi32(_mm256_slli_epi32(frequency, 19), _mm256_set1_epi32(1));
    const Vector full = _mm256_cmpgt_epi32(x, most);
    const auto mask = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(full)));
    const Vector low = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
    const __m128i narrow =
        _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(words - 8),
                     _mm_shuffle_epi8(narrow, load_half(kShuffles.compress[mask])));
    words -= __builtin_popcount(mask);
    x = _mm256_srlv_epi32(x, _mm256_and_si256(full, _mm256_set1_epi32(16)));
    const Vector even = _mm256_mul_epu32(x, reciprocal);
    const Vector odd =
        _mm256_mul_epu32(_mm256_srli_epi64(x, 32), _mm256_srli_epi64(reciprocal, 32));
    const Vector high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    const Vector quotient = _mm256_srlv_epi32(high, _mm256_srli_epi32(rest, 26));
    const Vector others = _mm256_sub_epi32(_mm256_set1_epi32(kFrequencySum), frequency);
    const Vector bias = _mm256_and_si256(_mm256_srli_epi32(rest, 13), _mm256_set1_epi32(0x1fff));
    return _mm256_add_epi32(_mm256_add_epi32(x, bias), _mm256_mullo_epi32(quotient, others));
  }
  // Returns the entries of the symbols.
  [[gnu::always_inline]] static Vector take(const DecoderTable& table, Vector& state,
                                            const Stored<uint16_t>*& words) {
    const Vector low = _mm256_set1_epi32(kFrequencySum - 1);
    const Vector entry = _mm256_i32gather_epi32(reinterpret_cast<const int*>(table.at),
                                                _mm256_and_si256(state, low), 4);
    const Vector upper = _mm256_srli_epi32(state, kFrequencyBits);
    const Vector frequency = _mm256_and_si256(_mm256_srli_epi32(entry, 12), low);
    const Vector x = _mm256_add_epi32(_mm256_mullo_epi32(upper, frequency),
                                      _mm256_add_epi32(upper, _mm256_and_si256(entry, low)));
    const Vector empty = _mm256_cmpgt_epi32(_mm256_set1_epi32(kLowestState), x);
    const auto mask = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(empty)));
    const __m128i next = _mm_shuffle_epi8(load_half(words), load_half(kShuffles.expand[mask]));
    words += __builtin_popcount(mask);
    state = _mm256_or_si256(_mm256_sllv_epi32(x, _mm256_and_si256(empty, _mm256_set1_epi32(16))),
                            _mm256_cvtepu16_epi32(next));
    return entry;
  }
  // Stores the symbols of entries.
  template <int kRegisters>
  [[gnu::always_inline]] static void store_symbols(const Vector (&entries)[kRegisters],
                                                   uint8_t* symbols) {
    if constexpr (kRegisters == 4) {
      const auto join = [&](int i) {
        return _mm256_packus_epi32(_mm256_srli_epi32(entries[i], 24),
                                   _mm256_srli_epi32(entries[i + 1], 24));
      };
      const Vector bytes = _mm256_packus_epi16(join(0), join(2));
      const Vector order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      _mm256_storeu_si256(reinterpret_cast<Vector*>(symbols),
                          _mm256_permutevar8x32_epi32(bytes, order));
    } else {
      for (int i = 0; i < kRegisters; ++i) {
        const Vector bytes = _mm256_srli_epi32(entries[i], 24);
        const __m128i narrow =
            _mm_packus_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(symbols + 8 * i),
                         _mm_packus_epi16(narrow, narrow));
      }
    }
  }
};

#endif
#if defined(__AVX512F__)

// Sixteen 32-bit lanes with AVX-512. The masks are all ones: see vectors-inl.h.
struct Sixteen {
  using Vector = __m512i;
  static constexpr int kCount = 16;
  static constexpr __mmask16 kAll = 0xffff;

  [[gnu::always_inline]] static Vector load(const uint32_t* from) {
    return _mm512_loadu_si512(from);
  }
  [[gnu::always_inline]] static void store(Vector v, uint32_t* to) { _mm512_storeu_si512(to, v); }
  [[gnu::always_inline]] static Vector load_bytes(const uint8_t* from) {
    return _mm512_maskz_cvtepu8_epi32(kAll, load_half(from));
  }
  [[gnu::always_inline]] static Vector gather(const uint32_t* table, Vector at) {
    return _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), kAll, at, table, 4);
  }
  [[gnu::always_inline]] static Vector right(Vector v, unsigned bits) {
    return _mm512_maskz_srli_epi32(kAll, v, bits);
  }
  [[gnu::always_inline]] static Vector put(const EncoderTable& table, Vector symbols, Vector x,
                                           Stored<uint16_t>*& words) {
    const Vector rest = gather(table.rest, symbols);
    const Vector reciprocal = gather(table.reciprocal, symbols);
    const Vector frequency = _mm512_and_si512(rest, _mm512_set1_epi32(0x1fff));
    const Vector most =
        _mm512_sub_epi32(_mm512_maskz_slli_epi32(kAll, frequency, 19), _mm512_set1_epi32(1));
    const __mmask16 full = _mm512_cmpgt_epi32_mask(x, most);
    const int count = __builtin_popcount(full);
    words -= count;
    _mm256_mask_storeu_epi16(
        words, static_cast<__mmask16>((1u << count) - 1),
        _mm512_maskz_cvtepi32_epi16(kAll, _mm512_maskz_compress_epi32(full, x)));
    x = _mm512_mask_srli_epi32(x, full, x, 16);
    const Vector even = _mm512_maskz_mul_epu32(0xff, x, reciprocal);
    const Vector odd = _mm512_maskz_mul_epu32(0xff, _mm512_maskz_srli_epi64(0xff, x, 32),
                                              _mm512_maskz_srli_epi64(0xff, reciprocal, 32));
    const Vector high =
        _mm512_mask_blend_epi32(0xaaaa, _mm512_maskz_srli_epi64(0xff, even, 32), odd);
    const Vector quotient = _mm512_maskz_srlv_epi32(kAll, high, right(rest, 26));
    const Vector others = _mm512_sub_epi32(_mm512_set1_epi32(kFrequencySum), frequency);
    const Vector bias = _mm512_and_si512(right(rest, 13), _mm512_set1_epi32(0x1fff));
    return _mm512_add_epi32(_mm512_add_epi32(x, bias), _mm512_mullo_epi32(quotient, others));
  }
  [[gnu::always_inline]] static Vector take(const DecoderTable& table, Vector& state,
                                            const Stored<uint16_t>*& words) {
    const Vector low = _mm512_set1_epi32(kFrequencySum - 1);
    const Vector entry = gather(table.at, _mm512_and_si512(state, low));
    const Vector upper = right(state, kFrequencyBits);
    const Vector frequency = _mm512_and_si512(right(entry, 12), low);
    const Vector x = _mm512_add_epi32(_mm512_mullo_epi32(upper, frequency),
                                      _mm512_add_epi32(upper, _mm512_and_si512(entry, low)));
    const __mmask16 empty = _mm512_cmplt_epi32_mask(x, _mm512_set1_epi32(kLowestState));
    const Vector next = _mm512_maskz_expand_epi32(
        empty, _mm512_maskz_cvtepu16_epi32(
                   kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words))));
    words += __builtin_popcount(empty);
    state = _mm512_or_si512(_mm512_mask_slli_epi32(x, empty, x, 16), next);
    return entry;
  }
  template <int kRegisters>
  [[gnu::always_inline]] static void store_symbols(const Vector (&entries)[kRegisters],
                                                   uint8_t* symbols) {
    for (int i = 0; i < kRegisters; ++i)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(symbols + 16 * i),
                       _mm512_maskz_cvtepi32_epi8(kAll, right(entries[i], 24)));
  }
};

#endif
#if defined(__AVX2__)

// The states of kRegisters registers. A group is a symbol per lane.
template <typename Register, int kRegisters>
struct VectorLanes {
  static constexpr int kLanesOfGroup = kRegisters * Register::kCount;
  typename Register::Vector states[kRegisters];

  explicit VectorLanes(const uint32_t* from) {
    for (int i = 0; i < kRegisters; ++i) states[i] = Register::load(from + i * Register::kCount);
  }
  void store(uint32_t* to) const {
    for (int i = 0; i < kRegisters; ++i) Register::store(states[i], to + i * Register::kCount);
  }
  [[gnu::always_inline]] Stored<uint16_t>* put(const EncoderTable& table, const uint8_t* symbols,
                                               Stored<uint16_t>* words) {
#pragma GCC unroll 4
    for (int i = kRegisters - 1; i >= 0; --i) {
      const auto loaded = Register::load_bytes(symbols + i * Register::kCount);
      states[i] = Register::put(table, loaded, states[i], words);
    }
    return words;
  }
  // Reads at most the next kLanesOfGroup words.
  [[gnu::always_inline]] const Stored<uint16_t>* take(const DecoderTable& table,
                                                      const Stored<uint16_t>* words,
                                                      uint8_t* symbols) {
    typename Register::Vector entries[kRegisters];
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) entries[i] = Register::take(table, states[i], words);
    Register::store_symbols(entries, symbols);
    return words;
  }
};

#endif

// ---- 5. streams ----

// The interleaved coder of lanes that are not in vector registers. A group is a symbol per lane.
template <int kCount>
struct ScalarLanes {
  static constexpr int kLanesOfGroup = kCount;
  uint32_t states[kCount];

  explicit ScalarLanes(const uint32_t* from) { __builtin_memcpy(states, from, sizeof(states)); }
  void store(uint32_t* to) const { __builtin_memcpy(to, states, sizeof(states)); }

  [[gnu::always_inline]] Stored<uint16_t>* put(const EncoderTable& table, const uint8_t* symbols,
                                               Stored<uint16_t>* words) {
    for (int lane = kCount; lane-- > 0;) put_symbol(table, symbols[lane], states[lane], words);
    return words;
  }
  // Reads at most the next kCount words.
  [[gnu::always_inline]] const Stored<uint16_t>* take(const DecoderTable& table,
                                                      const Stored<uint16_t>* words,
                                                      uint8_t* symbols) {
    for (int lane = 0; lane < kCount; ++lane)
      take_symbol(table, states[lane], words, words + 1, symbols[lane]);
    return words;
  }
};

// Calls visit.template operator()<Lanes>() with the best type for this number of lanes.
template <typename Visit>
[[gnu::always_inline]] inline auto with_lanes(int lanes, const Visit& visit) {
  switch (lanes) {
#if defined(__AVX512F__)
    case 32:
      return visit.template operator()<VectorLanes<Sixteen, 2>>();
    case 16:
      return visit.template operator()<VectorLanes<Sixteen, 1>>();
    case 8:
      return visit.template operator()<VectorLanes<Eight, 1>>();
#elif defined(__AVX2__)
    case 32:
      return visit.template operator()<VectorLanes<Eight, 4>>();
    case 16:
      return visit.template operator()<VectorLanes<Eight, 2>>();
    case 8:
      return visit.template operator()<VectorLanes<Eight, 1>>();
#else
    case 32:
      return visit.template operator()<ScalarLanes<32>>();
    case 16:
      return visit.template operator()<ScalarLanes<16>>();
    case 8:
      return visit.template operator()<ScalarLanes<8>>();
#endif
    case 4:
      return visit.template operator()<ScalarLanes<4>>();
    case 2:
      return visit.template operator()<ScalarLanes<2>>();
    default:
      return visit.template operator()<ScalarLanes<1>>();
  }
}

int64_t rans_encode(const uint8_t* symbols, int64_t numel, int lanes, const uint16_t* frequencies,
                    std::byte* bytes) {
  uint32_t states[kMostRansLanes];
  for (int lane = 0; lane < lanes; ++lane) states[lane] = kLowestState;
  if (numel == 0 || frequencies[symbols[0]] == kFrequencySum) {  // takes no words
    __builtin_memcpy(bytes, states, 4 * static_cast<size_t>(lanes));
    return 4 * lanes;
  }
  const EncoderTable table(frequencies);
  // The last symbol comes first, so the words are written from the end of the room.
  auto* const end = reinterpret_cast<Stored<uint16_t>*>(bytes + most_rans_bytes(numel, lanes));
  auto* words = end;
  const int64_t whole = numel & -int64_t{lanes};
  for (int64_t i = numel; i-- > whole;) put_symbol(table, symbols[i], states[i - whole], words);
  with_lanes(lanes, [&]<typename Lanes>() {
    Lanes group(states);
    for (int64_t i = whole; i > 0; i -= Lanes::kLanesOfGroup)
      words = group.put(table, symbols + i - Lanes::kLanesOfGroup, words);
    group.store(states);
  });
  const int64_t length = 2 * (end - words);
  __builtin_memcpy(bytes, states, 4 * static_cast<size_t>(lanes));
  __builtin_memmove(bytes + 4 * lanes, words, static_cast<size_t>(length));
  return 4 * lanes + length;
}

bool rans_decode(const std::byte* bytes, int64_t size, int64_t numel, int lanes,
                 const uint16_t* frequencies, uint8_t* symbols) {
  if (size < 4 * lanes || size % 2 != 0) return false;
  uint32_t states[kMostRansLanes];
  __builtin_memcpy(states, bytes, 4 * static_cast<size_t>(lanes));
  for (int lane = 0; lane < lanes; ++lane)
    if (states[lane] < kLowestState || states[lane] >> 31 != 0) return false;
  for (int s = 0; s < kSymbols; ++s) {
    if (frequencies[s] != kFrequencySum) continue;
    for (int lane = 0; lane < lanes; ++lane)
      if (states[lane] != kLowestState) return false;
    if (numel > 0) __builtin_memset(symbols, s, static_cast<size_t>(numel));
    return size == 4 * lanes;
  }
  const DecoderTable table(frequencies);
  const auto* words = reinterpret_cast<const Stored<uint16_t>*>(bytes + 4 * lanes);
  const auto* end = reinterpret_cast<const Stored<uint16_t>*>(bytes + size);
  const int64_t whole = numel & -int64_t{lanes};
  // A group may read a word per lane. So the last words are copied and padded.
  Stored<uint16_t> last[2 * kMostRansLanes] = {};
  int64_t i = 0;
  with_lanes(lanes, [&]<typename Lanes>() {
    Lanes group(states);
    const auto decode = [&](const Stored<uint16_t>* limit) {
      for (; i < whole && words <= limit; i += Lanes::kLanesOfGroup)
        words = group.take(table, words, symbols + i);
    };
    if (end - words >= lanes) decode(end - lanes);
    const int64_t rest = end - words;
    if (rest > lanes) return;  // more words than symbols, which the comparison below refuses
    __builtin_memcpy(last, words, 2 * static_cast<size_t>(rest));
    words = last;
    end = last + rest;
    decode(end);
    group.store(states);
  });
  if (words > end) return false;
  for (; i < numel; ++i)
    if (!take_symbol(table, states[i - whole], words, end, symbols[i])) return false;
  bool complete = words == end;
  for (int lane = 0; lane < lanes; ++lane) complete &= states[lane] == kLowestState;
  return complete;
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
