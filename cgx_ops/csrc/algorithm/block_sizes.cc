#include "algorithm/block_sizes.h"

#include <cstring>

#include "base/status.h"

namespace cgx {

BlockSizes BlockSizes::of(const Plan& plan) {
  BlockSizes sizes;
  for (const int member : plan.members) {
    sizes.sent.push_back(numel_of(plan.sends[member]));
    sizes.expected.push_back(numel_of(plan.receives[member]));
  }
  return sizes;
}

BlockSizes BlockSizes::from_bytes(std::span<const std::byte> bytes, size_t members) {
  require(bytes.size() == BlockSizes::bytes(members), CGX_PEER_FAILED, "a list of block sizes has ",
          bytes.size(), " bytes instead of ", BlockSizes::bytes(members));
  BlockSizes sizes{std::vector<int64_t>(members), std::vector<int64_t>(members)};
  const size_t half = bytes.size() / 2;
  std::memcpy(sizes.sent.data(), bytes.data(), half);
  std::memcpy(sizes.expected.data(), bytes.data() + half, half);
  return sizes;
}

Bytes BlockSizes::to_bytes() const {
  Bytes all = cgx::to_bytes(std::as_bytes(std::span(sent)));
  const auto rest = std::as_bytes(std::span(expected));
  all.insert(all.end(), rest.begin(), rest.end());
  return all;
}

std::string difference(const std::vector<int>& members, const std::vector<BlockSizes>& all) {
  for (size_t from = 0; from < all.size(); ++from) {
    for (size_t to = 0; to < all.size(); ++to) {
      const int64_t sent = all[from].sent[to], expected = all[to].expected[from];
      if (sent != expected)
        return join("rank ", members[from], " sends ", sent, " elements to rank ", members[to],
                    ", which expects ", expected,
                    "; the input splits of the sender must match the output splits of ",
                    "the receiver");
    }
  }
  return "";
}

}  // namespace cgx
