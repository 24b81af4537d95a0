// Ascending places of a few among many, as bytes: the code of Elias (1974) and Fano (1971), which
// takes less than half a bit a place more than there is to tell.
//
// A place's low bits, log2(numel / count) of them, lie end to end. Of its high bits place i sets
// bit (high + i) of a second field.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace cgx {

// Of `count` places below `numel`, 0 < count <= numel < 2^32.
int64_t places_bytes(int64_t numel, int64_t count);
void write_places(std::span<const uint32_t> places, int64_t numel, std::byte* bytes);

// Throws Error(CGX_INVALID_ARGUMENT) if the bytes are not those of so many ascending places.
void read_places(const std::byte* bytes, int64_t numel, std::span<uint32_t> places);

}  // namespace cgx
