// The sizes of the blocks of an all_to_all. They may differ between ranks, so ranks exchange and
// compare them before they send values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "plan.h"

namespace cgx {

// Elements of the blocks for, and from, each member of the plan.
struct BlockSizes {
  std::vector<int64_t> sent, expected;

  static BlockSizes of(const Plan& plan);
  // Throws Error(CGX_PEER_FAILED) unless the bytes are those of `members` members.
  static BlockSizes from_bytes(std::span<const std::byte> bytes, size_t members);
  static size_t bytes(size_t members) { return 2 * members * sizeof(int64_t); }
  Bytes to_bytes() const;
};

// Describes the first block whose sender and receiver have different sizes. Empty: there is none.
// `all`: by member.
std::string difference(const std::vector<int>& members, const std::vector<BlockSizes>& all);

}  // namespace cgx
