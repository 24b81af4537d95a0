// Encodes ascending indices (Elias 1974, Fano 1971), within half a bit per index of the optimum.
//
// The low log2(numel / count) bits of the indices are stored contiguously. For the high bits, index
// i sets bit (high + i) of a second field.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace cgx {

// Size of `count` encoded indices below `numel`, 0 < count <= numel < 2^32.
int64_t indices_bytes(int64_t numel, int64_t count);
void write_indices(std::span<const uint32_t> indices, int64_t numel, std::byte* bytes);

// Throws Error(CGX_INVALID_ARGUMENT) if the bytes do not encode as many ascending indices.
void read_indices(const std::byte* bytes, int64_t numel, std::span<uint32_t> indices);

}  // namespace cgx
