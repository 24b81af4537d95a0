// A tile: the values that a group of lanes holds in registers at a time; and the group's shared
// memory.
#pragma once

#include <cstdint>

#include "kernel/cuda/memory.h"
#include "kernel/cuda/noise.h"
#include "kernel/cuda/work.h"

namespace cgx::device::cuda {

// The shared memory of a group, for different uses in turn: arriving data; noise, a part of a
// record, and scratch memory of lanes; values as floats with their sums (measure.h) or during a
// rotation; the data of sparse.h.
template <typename Group>
struct Layout {
  static constexpr int kTile = tile_numel(Group::kLanes);
  static constexpr int kNoise = 2 * (kTile + kNoiseBlock);
  // The part of a record has at most a byte per value, and one per block.
  static constexpr int kStage = static_cast<int>(kHeaderRoom) + kTile + kTile / 16 + kWindow + 8;
  static constexpr int kStageAt = kNoise, kScratchAt = kNoise + kStage;
  // A bucket of 512 values and seven messages of 4 bits fit into 8 bytes per value.
  static constexpr int kArriving = (Group::kLanes == kWarpLanes ? 32 : 21) * kTile / 4;
  static constexpr int kBytes = kArriving + kWindow;
  static_assert(kStageAt % 16 == 0 && kScratchAt % 16 == 0);
  static_assert(kScratchAt + 32 * Group::kLanes <= kArriving && 4 * kTile + 32 <= kArriving);
  // A record of rotated or sparse values after a tile of floats: 8 bits each, or a quarter of them
  // in 32 bits with their indices.
  static_assert(4 * kTile + 32 + kTile + kTile / 8 + 32 <= kArriving);
};

struct Tile {
  Unit units[kLaneUnits];
};

// Calls visit(u, at, count) for each of this lane's units in a tile of `numel` values: its offset
// in the tile, and its number of values, 1 to 8.
template <int kLanes, typename Visit>
CGX_LANE void for_units(int lane, int numel, const Visit& visit) {
  CGX_UNROLL
  for (int u = 0; u < kLaneUnits; ++u) {
    const int at = kUnit * (u * kLanes + lane);
    if (at < numel) visit(u, at, numel - at < kUnit ? numel - at : kUnit);
  }
}

// Copies a tile of `numel` values to shared memory, and back. An incomplete last unit repeats its
// first value.
template <typename Group>
CGX_LANE void store_tile(Group& group, typename Group::template Lanes<Tile>& tile, int numel,
                         std::byte* buffer) {
  group.each([&](int lane) {
    for_units<Group::kLanes>(lane, numel, [&](int u, int at, int) {
      store_floats(buffer + 4 * at, tile[lane].units[u]);
    });
  });
}
template <typename Group>
CGX_LANE void load_tile(Group& group, typename Group::template Lanes<Tile>& tile, int numel,
                        const std::byte* buffer) {
  group.each([&](int lane) {
    for_units<Group::kLanes>(lane, numel, [&](int u, int at, int count) {
      tile[lane].units[u] = load_unit_of_buffer<Float32>(buffer, 4 * at, count);
    });
  });
}

template <typename Group>
CGX_LANE void fill_with_nan(Group& group, typename Group::template Lanes<Tile>& tile) {
  group.each([&](int lane) {
    CGX_UNROLL
    for (Unit& unit : tile[lane].units) CGX_UNROLL
    for (float& x : unit.at) x = float_of(kFloat32Nan);
  });
}

}  // namespace cgx::device::cuda
