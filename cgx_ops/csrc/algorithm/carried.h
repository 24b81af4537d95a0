// The steps of an allreduce whose messages the caller sends (cgx.h, section 5): the arithmetic of
// sra and one_shot without a transport. There are no headers. For randk, messages of encode() begin
// with a hash of the seeds, which must be equal on all ranks.
//
// A CUDA call has the same messages. Its buffers also have room for a message of this rank to
// itself, so that the distances between ranks' messages are equal, as kernels require.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "algorithm/layout.h"
#include "plan.h"

namespace cgx {

class Carried {
 public:
  // Throws Error(CGX_INVALID_ARGUMENT or CGX_UNSUPPORTED).
  Carried(const cgx_collective_t& call, int rank, int size, BuffersUsed used);

  const Plan& plan() const { return plan_; }
  const Layout& layout() const { return layout_; }
  bool one_shot() const { return plan_.algorithm == CGX_ONE_SHOT; }
  // A hash of the seeds of random indices, which precedes the messages of encode(); or nullopt.
  const std::optional<uint64_t>& seeds() const { return seeds_; }

  // Bytes to `owner` from each other rank, and from `owner` to each.
  int64_t scatter_bytes(int owner) const;
  int64_t gather_bytes(int owner) const;
  // The offsets of the messages for each rank in the buffer of encode(), then its size.
  std::vector<int64_t> encoded_at() const;
  // The same for the messages from each rank in the buffer of reduce().
  std::vector<int64_t> arrived_at() const;

  // Throw unless the buffers of a step have the sizes of cgx.h.
  void check_encode(std::span<const std::byte> messages) const;
  void check_reduce(std::span<const std::byte> arrived, std::span<const std::byte> message) const;
  // Returns the distance between two messages.
  int64_t check_decode(std::span<const std::byte> gathered) const;

  // The steps on CPUs. Unused bytes of output buffers are zeroed. Steps on GPUs: device/carried.h.
  void encode(std::span<std::byte> messages) const;
  void reduce(std::span<const std::byte> arrived, std::span<std::byte> message) const;
  void decode(std::span<const std::byte> gathered) const;

 private:
  void decode_values(std::span<const std::byte> gathered) const;
  // Bytes that encode() writes for `owner`.
  int64_t encoded_bytes(int owner) const;
  // Whether the buffers of encode() and reduce() have room for a message of this rank.
  bool has_room(int rank) const { return on_device_ || rank != plan_.rank; }
  int64_t seeds_bytes() const { return seeds_ ? sizeof(*seeds_) : 0; }
  void check_seeds(int source, const std::byte* message) const;

  const bool on_device_;
  const Plan plan_;
  const std::optional<uint64_t> seeds_;
  const Layout layout_;
};

}  // namespace cgx
