// The rotation (kernel/rotation.h) of a bucket that is in shared memory: step by step, for all
// groups in parallel.
#pragma once

#include <cstdint>

#include "kernel/cuda/arithmetic.h"
#include "kernel/cuda/memory.h"
#include "kernel/cuda/tile.h"
#include "kernel/rotation.h"

namespace cgx::device::cuda {

// A lane's part of changing the signs.
template <int kLanes>
CGX_LANE void flip_signs(int lane, std::byte* values, int numel, int log) {
  const int group = kRotationColumns << log;
  const int rotated = numel >> log << log;  // the columns of a last group are complete
  CGX_ROLLED
  for (int i = lane; i < rotated; i += kLanes) {
    const uint32_t sign = rotation_sign(static_cast<uint32_t>(i % group));
    const auto bits = load<uint32_t>(values + 4 * i);
    store(values + 4 * i, is_nan(bits) ? kFloat32Nan : bits ^ sign);
  }
}

// A lane's part of one step: pairs of rows at a distance of `half`.
template <int kLanes>
CGX_LANE void add_pairs(int lane, std::byte* values, int numel, int log, int half, float scale) {
  const int group = kRotationColumns << log;
  const int pairs_of_group = group / 2;
  const int whole = numel / group;                    // groups
  const int columns_at_end = (numel % group) >> log;  // of the last group
  const int pairs = whole * pairs_of_group + (columns_at_end << log) / 2;
  CGX_ROLLED
  for (int i = lane; i < pairs; i += kLanes) {
    const int number = i / pairs_of_group;
    const int columns = number < whole ? kRotationColumns : columns_at_end;
    const int pair = (i - number * pairs_of_group) / columns;
    const int column = (i - number * pairs_of_group) % columns;
    const int row = pair / half * 2 * half + pair % half;
    std::byte* const first = values + 4 * (number * group + row * columns + column);
    std::byte* const second = first + 4 * half * columns;
    const float a = load<float>(first), b = load<float>(second);
    store(first, multiply(add(a, b), scale));
    store(second, multiply(subtract(a, b), scale));
  }
}

template <bool kBack, typename Group>
CGX_LANE void rotate(Group& group, std::byte* values, int numel, int log) {
  const auto flip = [&](int lane) { flip_signs<Group::kLanes>(lane, values, numel, log); };
  if (!kBack) group.each(flip);
  CGX_ROLLED
  for (int half = 1; half < 1 << log; half *= 2) {
    const float scale = 2 * half == 1 << log ? rotation_scale(log, kBack) : 1.0f;
    group.each([&](int lane) { add_pairs<Group::kLanes>(lane, values, numel, log, half, scale); });
  }
  if (kBack) group.each(flip);
}

// For a tile that holds a whole bucket.
template <bool kBack = false, typename Group>
CGX_LANE void rotate_tile(Group& group, std::byte* buffer,
                          typename Group::template Lanes<Tile>& tile, int numel, int log) {
  store_tile(group, tile, numel, buffer);
  rotate<kBack>(group, buffer, numel, log);
  load_tile(group, tile, numel, buffer);
}

}  // namespace cgx::device::cuda
