// The steps of an allreduce whose messages the caller sends (cgx.h, section 5): the arithmetic of
// sra and one_shot without a transport. There are no headers. For randk, messages of encode() begin
// with a hash of the seeds, which must be equal on all ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "algorithm/layout.h"
#include "plan.h"

namespace cgx {

class Carried {
 public:
  // Throws Error(CGX_INVALID_ARGUMENT or CGX_UNSUPPORTED).
  Carried(const cgx_collective_t& call, int rank, int size, BuffersUsed used);

  const Plan& plan() const { return plan_; }
  // Bytes to `owner` from each other rank, and from `owner` to each.
  int64_t scatter_bytes(int owner) const;
  int64_t gather_bytes(int owner) const;

  // Sizes are checked against cgx.h. Unused bytes of output buffers are zeroed.
  void encode(std::span<std::byte> messages) const;
  void reduce(std::span<const std::byte> arrived, std::span<std::byte> message) const;
  void decode(std::span<const std::byte> gathered) const;

 private:
  bool one_shot() const { return plan_.algorithm == CGX_ONE_SHOT; }
  // Bytes that encode() writes for `owner`.
  int64_t encoded_bytes(int owner) const;
  int64_t seeds_bytes() const { return seeds_ ? sizeof(*seeds_) : 0; }
  void check_seeds(int source, const std::byte* message) const;

  const Plan plan_;
  const std::optional<uint64_t> seeds_;
  const Layout layout_;
};

}  // namespace cgx
