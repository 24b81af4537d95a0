// Sparse buckets (docs/reference/compressor_formats.md): a few values, and their indices unless
// these are derived from a seed. A group holds a whole bucket.
//
//   1. the layout of shared memory
//   2. selecting values: one bit each
//   3. values -> record
//   4. record -> values
//   5. the format, for kernels
#pragma once

#include <bit>
#include <cstdint>

#include "kernel/bucket_format.h"
#include "kernel/cuda/arithmetic.h"
#include "kernel/cuda/memory.h"
#include "kernel/cuda/noise.h"
#include "kernel/cuda/targets.h"
#include "kernel/cuda/tile.h"
#include "kernel/cuda/uniform.h"
#include "kernel/cuda/work.h"

namespace cgx::device::cuda {

// ---- 1. layout ----

// Shared memory from the start of the buffer: a bit per value for whether it is sent; temporarily,
// a bit for ties; the number of sent values before each word; the indices; then the parts of a
// record, each aligned.
template <typename Group>
struct SparseRoom {
  static constexpr int kTile = Layout<Group>::kTile;
  static constexpr int kChosen = 0, kTies = kTile / 8, kBefore = kTile / 4;
  static constexpr int kIndices = kBefore + kTile / 16;  // two bytes each, for a quarter of the
                                                         // values
  static constexpr int kLow = kIndices + kTile / 2 + 16, kHigh = kLow + kTile / 4;
  static constexpr int kValues = kHigh + kTile / 4, kEnd = kValues + kTile + kWindow;
  static_assert(kEnd <= Layout<Group>::kScratchAt && kLow % 16 == 0 && kIndices % 4 == 0);
  // After a tile of values and a record of random indices: a bit per value.
  static constexpr int kDrawn = Layout<Group>::kArriving - kTile / 8;
  static_assert(4 * kTile + 16 + kTile + kWindow <= kDrawn && kDrawn % 4 == 0);
};

// ---- 2. selection ----

CGX_LANE int ones(uint32_t word) {
#if defined(__CUDACC__)
  return __popc(word);
#else
  return std::popcount(word);
#endif
}

CGX_LANE uint32_t bits_below(int bit) { return (1u << bit) - 1; }

// The first `most` set bits; none if `most` is not positive.
CGX_LANE uint32_t first_bits(uint32_t word, int most) {
  uint32_t rest = word;
  CGX_ROLLED
  for (int i = 0; i < most && rest != 0; ++i) rest &= rest - 1;
  return word & ~rest;
}

// The number of set bits before word w.
CGX_LANE int ones_before(const std::byte* words, int w) {
  int count = 0;
  CGX_ROLLED
  for (int i = 0; i < w; ++i) count += ones(load<uint32_t>(words + 4 * i));
  return count;
}

// The number of values in a tile with a key of at least `least`.
template <typename Group>
CGX_LANE int count_from(Group& group, typename Group::template Lanes<Tile>& tile, int numel,
                        int32_t least) {
  typename Group::template Lanes<int32_t> counts;
  group.each([&](int lane) {
    counts[lane] = 0;
    for_units<Group::kLanes>(lane, numel, [&](int u, int, int count) {
      CGX_UNROLL
      for (int i = 0; i < kUnit; ++i)
        counts[lane] += i < count && magnitude_key(tile[lane].units[u].at[i]) >= least;
    });
  });
  return group.sum(counts);
}

// Sets the bits of the `count` values with the largest keys in a tile; of equal ones the first.
template <typename Group>
CGX_LANE void choose_largest(Group& group, std::byte* buffer, int numel, int count,
                             typename Group::template Lanes<Tile>& tile) {
  using Room = SparseRoom<Group>;
  // Finds the count-th largest key, bit by bit.
  int32_t least = 0;
  CGX_ROLLED
  for (int bit = 30; bit >= 0; --bit) {
    const int32_t more = least | 1 << bit;
    if (count_from(group, tile, numel, more) >= count) least = more;
  }
  const int larger = least == kNanKey ? 0 : count_from(group, tile, numel, least + 1);
  group.each([&](int lane) {
    for_units<Group::kLanes>(lane, numel, [&](int u, int at, int values) {
      uint32_t chosen = 0, ties = 0;
      CGX_UNROLL
      for (int i = 0; i < kUnit; ++i) {
        const int32_t key = magnitude_key(tile[lane].units[u].at[i]);
        chosen |= static_cast<uint32_t>(i < values && key > least) << i;
        ties |= static_cast<uint32_t>(i < values && key == least) << i;
      }
      store(buffer + Room::kChosen + at / kUnit, static_cast<uint8_t>(chosen));
      store(buffer + Room::kTies + at / kUnit, static_cast<uint8_t>(ties));
    });
  });
  group.each([&](int lane) {
    CGX_ROLLED
    for (int w = lane; 32 * w < numel; w += Group::kLanes) {
      std::byte* const word = buffer + Room::kChosen + 4 * w;
      const auto ties = load<uint32_t>(buffer + Room::kTies + 4 * w);
      const int left = count - larger - ones_before(buffer + Room::kTies, w);
      store(word, load<uint32_t>(word) | first_bits(ties, left));
    }
  });
}

// Draws `count` of `numel` indices, as compressor/randk.cc does, and sets their bits in `words`.
template <typename Group>
CGX_LANE void draw(Group& group, std::byte* words, int numel, int count, const Draw& indices) {
  group.each([&](int lane) {
    if (lane > 0) return;  // each depends on the previous ones
    NoiseWords drawn{};
    CGX_ROLLED
    for (int i = 0; i < count; ++i) {
      if (i % 4 == 0) {
        drawn = noise_words({indices.seed, static_cast<uint32_t>(i / 4), kIndicesPhase},
                            indices.first_index);
      }
      const auto most = static_cast<uint32_t>(numel - count + i);
      const uint32_t word = drawn.at[0];
      drawn = {{drawn.at[1], drawn.at[2], drawn.at[3], 0}};
      auto index = static_cast<uint32_t>(uint64_t{word} * (most + 1) >> 32);
      const auto is_set = [&](uint32_t at) {
        return (load<uint32_t>(words + at / 32 * 4) >> (at % 32) & 1u) != 0;
      };
      if (is_set(index)) index = most;
      std::byte* const to = words + index / 32 * 4;
      store(to, load<uint32_t>(to) | 1u << (index % 32));
    }
  });
}

// Clears the words of `numel` values.
template <typename Group>
CGX_LANE void clear_bits(Group& group, std::byte* words, int numel) {
  group.each([&](int lane) {
    CGX_ROLLED
    for (int w = lane; 32 * w < numel; w += Group::kLanes) store(words + 4 * w, uint32_t{0});
  });
}

// Stores the number of set bits before each word.
template <typename Group>
CGX_LANE void count_before(Group& group, const std::byte* words, int numel, std::byte* before) {
  group.each([&](int lane) {
    CGX_ROLLED
    for (int w = lane; 32 * w < numel; w += Group::kLanes)
      store(before + 2 * w, static_cast<uint16_t>(ones_before(words, w)));
  });
}

// ---- 3. encode ----

CGX_LANE void set_bit(std::byte* words, int bit) {
#if defined(__CUDACC__)
  atomicOr(reinterpret_cast<uint32_t*>(words + bit / 32 * 4), 1u << (bit % 32));
#else
  std::byte* const to = words + bit / 32 * 4;
  store(to, load<uint32_t>(to) | 1u << (bit % 32));
#endif
}

// Lists the indices of the set bits, and encodes them in the two parts of the Elias-Fano code.
template <typename Group>
CGX_LANE void make_indices(Group& group, std::byte* buffer, const SparseRecord& record) {
  using Room = SparseRoom<Group>;
  clear_bits(group, buffer + Room::kHigh, 8 * record.high_bytes);
  group.each([&](int lane) {
    CGX_ROLLED
    for (int w = lane; 32 * w < record.numel; w += Group::kLanes) {
      int rank = load<uint16_t>(buffer + Room::kBefore + 2 * w);
      CGX_ROLLED
      for (auto rest = load<uint32_t>(buffer + Room::kChosen + 4 * w); rest != 0;
           rest &= rest - 1, ++rank) {
        const int index = 32 * w + ones((rest & (0u - rest)) - 1);
        store(buffer + Room::kIndices + 2 * rank, static_cast<uint16_t>(index));
        set_bit(buffer + Room::kHigh, (index >> record.low_bits) + rank);
      }
    }
  });
  group.each([&](int lane) {
    CGX_ROLLED
    for (int i = lane; i < record.low_bytes; i += Group::kLanes) {
      uint32_t byte = 0;
      CGX_UNROLL
      for (int bit = 0; bit < 8; ++bit) {
        const int rank = (8 * i + bit) / record.low_bits;
        if (rank >= record.count) break;
        const uint32_t index = load<uint16_t>(buffer + Room::kIndices + 2 * rank);
        byte |= (index >> ((8 * i + bit) % record.low_bits) & 1u) << bit;
      }
      store(buffer + Room::kLow + i, static_cast<uint8_t>(byte));
    }
  });
}

// Stores the values to be sent, contiguously, and the result and residual of all values.
template <typename Value, typename Group>
CGX_LANE void make_values(Group& group, std::byte* buffer, const SparseRecord& record,
                          const Target& target, bool poisoned,
                          typename Group::template Lanes<Tile>& tile) {
  using Room = SparseRoom<Group>;
  using Half = HalfOf<Value>;
  using Bits = typename Value::Bits;
  const bool half = target.coding.bits == kHalfBits;
  group.each([&](int lane) {
    std::byte* scratch = buffer + Layout<Group>::kScratchAt + lane * kUnitBytes<Value>;
    for_units<Group::kLanes>(lane, record.numel, [&](int u, int at, int count) {
      const auto word = load<uint32_t>(buffer + Room::kChosen + at / 32 * 4);
      int rank =
          load<uint16_t>(buffer + Room::kBefore + at / 32 * 2) + ones(word & bits_below(at % 32));
      const Unit& values = tile[lane].units[u];
      Unit decoded;
      CGX_UNROLL
      for (int i = 0; i < kUnit; ++i) {
        const bool sent = i < count && (word >> (at % 32 + i) & 1u) != 0;
        const float x = poisoned ? float_of(kFloat32Nan) : with_one_nan(values.at[i]);
        float known = 0.0f;
        if (sent && half) {
          const uint16_t bits = Half::round(x);
          store(buffer + Room::kValues + 2 * rank, bits);
          known = Half::widen(bits);
        } else if (sent) {
          const Bits bits = Value::round(x);
          store(buffer + Room::kValues + record.width * rank, bits);
          known = Value::widen(bits);
        }
        rank += sent;
        decoded.at[i] = add(known, 0.0f);
      }
      store_outcome<Value>(target, at, count, values, decoded, scratch);
    });
  });
}

// Writes the record of a bucket.
template <typename Value, typename Group, typename Source>
CGX_LANE void write_sparse(Group& group, std::byte* buffer, const Target& target, int64_t numel,
                           const Source& source, const Draw& indices) {
  using Room = SparseRoom<Group>;
  const SparseRecord record(numel, target.coding, sizeof(typename Value::Bits));
  typename Group::template Lanes<Tile> tile;
  source(tile, 0, record.numel);
  clear_bits(group, buffer + Room::kChosen, record.numel);
  clear_bits(group, buffer + Room::kTies, record.numel);
  bool poisoned = false;
  if (target.coding.drawn) {
    poisoned = count_from(group, tile, record.numel, 0x7f800000) > 0;
    draw(group, buffer + Room::kChosen, record.numel, record.count, indices);
  } else {
    choose_largest(group, buffer, record.numel, record.count, tile);
  }
  count_before(group, buffer + Room::kChosen, record.numel, buffer + Room::kBefore);
  if (!target.coding.drawn) make_indices(group, buffer, record);
  make_values<Value>(group, buffer, record, target, poisoned, tile);
  group.each([&](int lane) {
    for_copies(target.copies, target.record, [&](std::byte* to) {
      copy_out<Group::kLanes>(lane, to, buffer, Room::kLow, record.low_bytes);
      copy_out<Group::kLanes>(lane, to + record.low_bytes, buffer, Room::kHigh, record.high_bytes);
      copy_out<Group::kLanes>(lane, to + record.values_at(), buffer, Room::kValues,
                              record.count * record.width);
    });
  });
}

// ---- 4. decode ----

// Value `rank` of a record at offset `at` of the buffer.
template <typename Value>
CGX_LANE float sent_value(const std::byte* buffer, int at, const SparseRecord& record, int rank,
                          bool half) {
  const int offset = at + record.values_at() + rank * record.width;
  const auto bits = static_cast<uint32_t>(load_field(buffer, offset, record.width));
  using Bits = typename Value::Bits;
  const float x = half ? HalfOf<Value>::widen(static_cast<uint16_t>(bits))
                       : Value::widen(static_cast<Bits>(bits));
  return add(x, 0.0f);
}

// Decodes a record at offset `at` to the values of a bucket, as floats at the start of the buffer.
template <typename Value, typename Group>
CGX_LANE void expand_sparse(Group& group, std::byte* buffer, int at, const Coding& coding,
                            int numel, const Draw& indices) {
  const SparseRecord record(numel, coding, sizeof(typename Value::Bits));
  const bool half = coding.bits == kHalfBits;
  group.each([&](int lane) {
    CGX_ROLLED
    for (int i = lane; i < numel; i += Group::kLanes) store(buffer + 4 * i, 0.0f);
  });
  const auto put = [&](int index, int rank) {
    if (index < numel && rank < record.count)
      store(buffer + 4 * index, sent_value<Value>(buffer, at, record, rank, half));
  };
  if (coding.drawn) {
    std::byte* const words = buffer + SparseRoom<Group>::kDrawn;
    clear_bits(group, words, numel);
    draw(group, words, numel, record.count, indices);
    group.each([&](int lane) {
      CGX_ROLLED
      for (int w = lane; 32 * w < numel; w += Group::kLanes) {
        int rank = ones_before(words, w);
        CGX_ROLLED
        for (auto rest = load<uint32_t>(words + 4 * w); rest != 0; rest &= rest - 1)
          put(32 * w + ones((rest & (0u - rest)) - 1), rank++);
      }
    });
    return;
  }
  const std::byte* const high = buffer + at + record.low_bytes;
  group.each([&](int lane) {
    CGX_ROLLED
    for (int i = lane; i < record.high_bytes; i += Group::kLanes) {
      int rank = 0;
      CGX_ROLLED
      for (int before = 0; before < i; ++before) rank += ones(load<uint8_t>(high + before));
      CGX_ROLLED
      for (uint32_t rest = load<uint8_t>(high + i); rest != 0; rest &= rest - 1, ++rank) {
        const int bit = 8 * i + ones((rest & (0u - rest)) - 1);
        const int low_at = rank * record.low_bits;
        const auto low =
            static_cast<uint32_t>(load_field(buffer, at + low_at / 8, 4) >> (low_at % 8)) &
            bits_below(record.low_bits);
        put(((bit - rank) << record.low_bits) + static_cast<int>(low), rank);
      }
    }
  });
}

// ---- 5. the format ----

// Sparse buckets. Uncompressed values use the kernels of uniform buckets.
struct SparseFormat : UniformFormat {
  static constexpr Formats kFormats = Formats::kSparse;
  CGX_LANE static Coding known(const Coding& coding) { return coding; }
};

}  // namespace cgx::device::cuda
