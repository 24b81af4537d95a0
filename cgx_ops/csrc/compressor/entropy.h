// An entropy-coded uniform quantizer: levels of one step per block, coded with variable length, so
// that a block has the desired mean number of bits per value. docs/reference/entropy_blocks.md
// defines the bytes.
#pragma once

#include <memory>

#include "compressor/codec.h"

namespace cgx {

std::unique_ptr<Codec> make_entropy(const CodecSettings& settings);

// Returns the largest size of a block of `numel` values. `rate`: in billionths.
constexpr int64_t most_entropy_bytes(int64_t numel, int64_t rate) {
  return numel * rate * 102 / 800000000000 + 16;
}

}  // namespace cgx
