// What the kernels of a GPU are told: plain structs, passed by value as kernel parameters, so that
// a launch needs no table in memory that would have to outlive it (or a CUDA graph that holds it).
//
//   Encode   this rank's values -> messages
//   Reduce   messages of all ranks -> their sum, in rank order -> one message, values, or both
//   Decode   a message -> values
//   Signals  what was written is told to the peers; theirs is waited for
//
// Work is a list of pieces, each a run of whole buckets of one segment (or of exact values): the
// layers of a DDP bucket are a launch or a few, not hundreds. No CUDA header: who builds these
// (device/) is tested without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"
#include "kernel/bucket_format.h"

namespace cgx::device {

inline constexpr int kMostPieces = 32;  // of a launch: kernel parameters are 4 KB at most
inline constexpr int kMostPeers = 16;   // that one launch writes to or is signalled by

// Everything is at any alignment; pointers are to memory that the device reads and writes.
struct Piece {
  const std::byte* values = nullptr;  // Encode, Reduce: this rank's own. Null where there is none
  std::byte* result = nullptr;  // Decode, Reduce: gets values, rounded to the dtype; null: nowhere
  // Encode, Reduce: of the values, in the dtype, or null (cgx.h). It is added to `values`, where
  // there are some, and then becomes what encoding has lost.
  std::byte* residual = nullptr;
  std::byte* message = nullptr;  // Encode: written. Decode: read. Reduce: rank 0's, read; others'
                                 // are `stride` apart
  std::byte* reduced = nullptr;  // Reduce: written; null: nowhere
  int64_t numel = 0;
  int64_t first_index = 0;  // of its first element, in its segment: a multiple of bucket_size
  int64_t bucket_size = 0;  // elements
  uint64_t seed = 0;        // of noise; and of places that are drawn, which no other seed is for
  // If not null, a seed is here, on the device: that of number `seed_number` after it is used.
  const uint64_t* seed_at = nullptr;
  Coding coding = {};          // of `message`
  Coding reduced_coding = {};  // of `reduced`; of a result too, where that is a vote
  int32_t seed_number = 0;     // of segments (base/seeds.h)
  int32_t block = 0;           // of a reduce_scatter's input: it changes the seed, too
};

struct Pieces {
  int32_t count = 0;
  Piece at[kMostPieces] = {};
};

// Further places that get the same bytes: how far they are from the first.
struct Copies {
  int32_t count = 0;
  int64_t distance[kMostPeers - 1] = {};
};

// Messages lie in one of two regions, in turns, so that none is overwritten while a peer reads it:
// exchange number e is in region e % 2, `bytes` behind the first if that is 1. What is written
// belongs to the exchange after the *done ones, what is read to the last of these. The count is the
// device's, not a parameter, so that a CUDA graph can be replayed. Null: one region.
struct Regions {
  const uint64_t* done = nullptr;
  int64_t bytes = 0;
};

// In all launches: `fault` is a word on the device, which does not change while a kernel runs
// (whoever writes it does so in the stream's order); if it is not 0 the collective has failed: no
// message is read or written (peers that do not know yet may be reading the last one), and every
// result and residual that would be written is NaN. Null: it cannot fail.

struct Encode {
  Dtype dtype = Dtype::kFloat32;
  RoundingMode rounding = RoundingMode::kNearest;
  uint32_t rank = 0, phase = 0;  // of the noise
  Pieces pieces = {};
  Copies copies = {};  // of messages
  Regions regions = {};
  const uint32_t* fault = nullptr;
};

// result = the sum itself unless `reduced` is written; then what that decodes to, so that this rank
// holds what its peers will. Bits of `reduced` are made from the fp32 sum, divided for avg. Of
// votes (kSign) own values count as what they would decode to, and so is the result.
struct Reduce {
  Dtype dtype = Dtype::kFloat32;
  RoundingMode rounding = RoundingMode::kNearest;
  Op op = Op::kSum;
  float divisor = 1.0f;          // of avg
  uint32_t rank = 0, phase = 0;  // of the noise
  int32_t size = 0;              // messages
  int32_t own = -1;    // whose values are at piece.values and not in a message; -1: nobody's
  int64_t stride = 0;  // bytes from one rank's message to the next
  float residual_scale = 1.0f;  // losses of sums are in units of the input: avg's divisor, else 1
  Pieces pieces = {};
  Copies copies = {};    // of `reduced`
  Regions regions = {};  // of messages, read, and of `reduced`, written
  const uint32_t* fault = nullptr;
};

struct Decode {
  Dtype dtype = Dtype::kFloat32;
  Pieces pieces = {};
  Regions regions = {};
  const uint32_t* fault = nullptr;
};

// What a rank says with a signal; all ranks must say the same.
struct Notice {
  uint64_t digest;     // of everything below, and of what did not fit
  uint64_t words[31];  // the sender's own business (device/group.cc): to tell what differs
};
struct Mailbox {
  uint64_t exchange;  // number of the last exchange that the sender has written its messages of
  Notice notice;
};
inline constexpr uint32_t kFailedAndTold = 1;           // of a fault word: peers know
inline constexpr uint64_t kGaveUp = uint64_t{1} << 63;  // with the number of the exchange in which
                                                        // the sender has failed

// What went wrong first, in host memory that the device writes.
struct Report {
  uint32_t status;  // a cgx_status_t, written last; CGX_OK: nothing
  int32_t rank;     // the peer's: late, gone, or of another mind
  uint64_t exchange;
  Notice ours, theirs;  // theirs: of CGX_MISMATCH
};

// One exchange: number *done + 1. Writes the notice, then the number, to this rank's mailbox at
// every peer, at system scope, after everything that the stream has done before; waits until every
// peer has done so here, and that in bounded time; counts the exchange.
//   a peer's number is too small after timeout_ns   -> CGX_TIMEOUT
//   it is kGaveUp and not above this one's           -> CGX_PEER_FAILED
//   its notice has another digest                    -> CGX_MISMATCH
// In each case sets *fault to kFailedAndTold and (the first time) *report, and writes kGaveUp to
// all peers: to both mailboxes, but after a mismatch to the next exchange's only, so that every
// rank sees for itself who says what. If *fault was set before by the host (to another value), only
// does the latter. Mailboxes of region r are `size` further for r = 1.
struct Signals {
  int32_t rank = 0, size = 0;
  Mailbox* at_peer[kMostPeers] =
      {};  // by peer: its array of mailboxes, by sender; own: this rank's
  uint64_t* done = nullptr;
  uint64_t timeout_ns = 0;
  Notice notice = {};
  uint32_t* fault = nullptr;
  Report* report = nullptr;
};

}  // namespace cgx::device
