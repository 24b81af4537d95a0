// Arguments of the GPU kernels: plain structs, passed by value as kernel parameters, so that a
// launch needs no table in memory that would have to outlive it (or a CUDA graph that contains it).
//
//   Encode   this rank's values -> messages
//   Reduce   messages of all ranks -> their sum, in rank order -> one message, values, or both
//   Decode   a message -> values
//   Signals  notifies peers that messages are written, and waits for theirs
//
// The work is a list of pieces, each a run of whole buckets of one segment, or of uncompressed
// values. So the layers of a DDP bucket need one or a few launches, not hundreds. No CUDA header is
// needed, so that device/, which builds these, can be tested without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"
#include "kernel/bucket_format.h"

namespace cgx::device {

inline constexpr int kMostPieces = 32;  // per launch: kernel parameters are limited to 4 KB
inline constexpr int kMostPeers = 16;   // that one launch writes to or signals

// All addresses may be unaligned, and are in memory that the device can access.
struct Piece {
  const std::byte* values = nullptr;  // Encode, Reduce: this rank's own values, or null
  std::byte* result = nullptr;  // Decode, Reduce: where to write values, rounded to the dtype; may
                                // be null
  // Encode, Reduce: error feedback in the dtype, or null (cgx.h). It is added to `values`, if there
  // are any, and then becomes the quantization error.
  std::byte* residual = nullptr;
  std::byte* message = nullptr;  // Encode: written. Decode: read. Reduce: rank 0's message, read;
                                 // the others follow at distances of `stride`
  std::byte* reduced = nullptr;  // Reduce: written; may be null
  int64_t numel = 0;
  int64_t first_index = 0;  // of the first element in its segment: a multiple of bucket_size
  int64_t bucket_size = 0;  // elements
  uint64_t seed = 0;        // of the noise, and of random indices, for which no derived seed is
                            // used
  // If not null, the address of a seed on the device; the segment's seed of number `seed_number` is
  // derived from it.
  const uint64_t* seed_at = nullptr;
  Coding coding = {};          // of `message`
  Coding reduced_coding = {};  // of `reduced`; for votes also of `result`
  int32_t seed_number = 0;     // of the segment (base/seeds.h)
  int32_t block = 0;           // block of a reduce_scatter's input, which changes the seed, too
};

struct Pieces {
  int32_t count = 0;
  Piece at[kMostPieces] = {};
};

// Distances to further addresses that receive the same bytes.
struct Copies {
  int32_t count = 0;
  int64_t distance[kMostPeers - 1] = {};
};

// Messages alternate between two regions, so that none is overwritten while a peer reads it.
// Exchange number e uses region e % 2; region 1 begins `bytes` after region 0. Writes belong to the
// exchange after the *done completed ones, and reads to the last of these. The count is in device
// memory and not a parameter, so that CUDA graphs can be replayed. Null: a single region.
struct Regions {
  const uint64_t* done = nullptr;
  int64_t bytes = 0;
};

// In all launches, `fault` is a word on the device that does not change while a kernel runs (it is
// written in stream order). If it is not 0, the collective has failed. Then no message is read or
// written, since peers that have not noticed may be reading the last one, and every result and
// residual becomes NaN. Null: cannot fail.

struct Encode {
  Dtype dtype = Dtype::kFloat32;
  RoundingMode rounding = RoundingMode::kNearest;
  uint32_t rank = 0, phase = 0;  // of the noise
  Pieces pieces = {};
  Copies copies = {};  // of the messages
  Regions regions = {};
  const uint32_t* fault = nullptr;
};

// `result` gets the sum or, if `reduced` is written, its decoded values, so that this rank has the
// same values as its peers. `reduced` is encoded from the fp32 sum, divided for avg. For votes
// (kSign), own values are encoded and decoded before they are added, and so is the result.
struct Reduce {
  Dtype dtype = Dtype::kFloat32;
  RoundingMode rounding = RoundingMode::kNearest;
  Op op = Op::kSum;
  float divisor = 1.0f;          // of avg
  uint32_t rank = 0, phase = 0;  // of the noise
  int32_t size = 0;              // number of messages
  int32_t own = -1;    // the rank whose values are at piece.values and not in a message; -1: none
  int64_t stride = 0;  // bytes from one rank's message to the next
  float residual_scale = 1.0f;  // residuals of sums are in units of the input: avg's divisor, else
                                // 1
  Pieces pieces = {};
  Copies copies = {};    // of `reduced`
  Regions regions = {};  // of messages (read) and of `reduced` (written)
  const uint32_t* fault = nullptr;
};

struct Decode {
  Dtype dtype = Dtype::kFloat32;
  Pieces pieces = {};
  Regions regions = {};
  const uint32_t* fault = nullptr;
};

// Sent with a signal. Must be equal on all ranks.
struct Notice {
  uint64_t digest;     // of all other words, and of data that did not fit
  uint64_t words[31];  // defined by the sender (device/direct.cc), to describe differences
};
struct Mailbox {
  uint64_t exchange;  // number of the last exchange whose messages the sender has written
  Notice notice;
};
inline constexpr uint32_t kFailedAndNotified = 1;       // fault word: peers have been notified
inline constexpr uint64_t kGaveUp = uint64_t{1} << 63;  // with the number of the exchange in which
                                                        // the sender failed

// The first failure, in host memory that the device writes.
struct Report {
  uint32_t status;  // a cgx_status_t, written last; CGX_OK: no failure
  int32_t rank;     // the peer that is late, lost, or disagrees
  uint64_t exchange;
  Notice ours, theirs;  // theirs: for CGX_MISMATCH
};

// One exchange, number *done + 1. Writes the notice, then the number, to this rank's mailbox at
// every peer, at system scope, after all earlier work of the stream. Then waits, at most for the
// timeout, until every peer has done the same here, and counts the exchange.
//   a peer's number is too small after timeout_ns -> CGX_TIMEOUT
//   it has kGaveUp and is not above this one's    -> CGX_PEER_FAILED
//   its notice has a different digest             -> CGX_MISMATCH
// On a failure it sets *fault to kFailedAndNotified and (the first time) *report, and writes
// kGaveUp to all peers. It writes both mailboxes, but after a mismatch only that of the next
// exchange, so that every rank sees the notices of this one. If the host has set *fault to another
// value before, it only writes kGaveUp. Mailboxes of region 1 are `size` after those of region 0.
struct Signals {
  int32_t rank = 0, size = 0;
  Mailbox* at_peer[kMostPeers] =
      {};  // per peer: its array of mailboxes, by sender; own entry: this rank's
  uint64_t* done = nullptr;
  uint64_t timeout_ns = 0;
  Notice notice = {};
  uint32_t* fault = nullptr;
  Report* report = nullptr;
};

}  // namespace cgx::device
