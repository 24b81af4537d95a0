// One exchange of Signals (launches.h), by one warp with one lane per peer.
//
//   1. Write the notice and the exchange number to every peer.
//   2. Wait for the peers' numbers, until all have arrived, one has failed, or the timeout has
//      passed.
//   3. Count the exchange, or report the failure to the host and the peers.
//
// Memory provides access to words shared with other GPUs and the host: load_acquire and
// store_release at system scope, fence, now (ns), pause.
#pragma once

#include <cstdint>

#include "kernel/cuda/group.h"
#include "kernel/cuda/launches.h"

namespace cgx::device::cuda {

// A lane's state of its peer.
struct Peer {
  bool awaited;
  uint32_t failure;  // a cgx_status_t
};

template <typename Memory, typename Group>
CGX_LANE void exchange(Group& group, const Signals& signals) {
  static_assert(kMostPeers <= Group::kLanes);
  constexpr int kWords = sizeof(Notice) / sizeof(uint64_t);
  const int rank = signals.rank, size = signals.size;
  const uint64_t number = *signals.done + 1;
  const auto region = static_cast<int>(number % 2) * size;
  // This rank's mailbox at a peer, and a peer's mailbox here.
  const auto mailbox_at = [&](int peer) -> Mailbox& {
    return signals.at_peer[peer][region + rank];
  };
  const auto mailbox_of = [&](int peer) -> Mailbox& {
    return signals.at_peer[rank][region + peer];
  };
  const uint32_t fault = *signals.fault;
  if (fault == kFailedAndNotified) return;
  bool failed = fault != 0;
  bool disagrees = false;

  typename Group::template Lanes<Peer> peers;
  typename Group::template Lanes<bool> flags;
  if (!failed) {
    group.each([&](int lane) {
      for (int peer = 0; peer < size; ++peer) {
        if (peer == rank) continue;
        auto* to = reinterpret_cast<uint64_t*>(&mailbox_at(peer).notice);
        const auto* from = reinterpret_cast<const uint64_t*>(&signals.notice);
        for (int i = lane; i < kWords; i += Group::kLanes) to[i] = from[i];
      }
      Memory::fence();
    });
    group.each([&](int lane) {
      peers[lane] = {lane < size && lane != rank, CGX_OK};
      if (peers[lane].awaited) Memory::store_release(&mailbox_at(lane).exchange, number);
    });

    const uint64_t begin = Memory::now();
    for (bool waiting = true; waiting && !failed;) {
      const bool late = Memory::now() - begin > signals.timeout_ns;
      group.each([&](int lane) {
        Peer& peer = peers[lane];
        if (peer.awaited) {
          const uint64_t theirs = Memory::load_acquire(&mailbox_of(lane).exchange);
          const uint64_t at = theirs & ~kGaveUp;
          if (theirs != at && at <= number) {
            peer.failure = CGX_PEER_FAILED;
          } else if (at >= number) {
            peer.awaited = false;
            if (mailbox_of(lane).notice.digest != signals.notice.digest)
              peer.failure = CGX_MISMATCH;
          } else if (late) {
            peer.failure = CGX_TIMEOUT;
          }
        }
        flags[lane] = peer.failure != CGX_OK;
      });
      failed = group.any(flags);
      group.each([&](int lane) { flags[lane] = peers[lane].awaited; });
      waiting = group.any(flags);
      if (waiting && !failed) Memory::pause();
    }
    if (!failed) {
      group.each([&](int lane) {
        if (lane == 0) *signals.done = number;
      });
      return;
    }
    // A mismatch is detected by all ranks: each must see it in the notices of this exchange.
    group.each([&](int lane) { flags[lane] = peers[lane].failure == CGX_MISMATCH; });
    disagrees = group.any(flags);
    // The report names the lowest failed rank; a mismatch takes precedence.
    typename Group::template Lanes<Extremes> ranks;
    group.each([&](int lane) {
      const bool counts = disagrees ? flags[lane] : peers[lane].failure != CGX_OK;
      const int named = counts ? lane : Group::kLanes;
      ranks[lane] = {named, named};
    });
    const int named = group.extremes(ranks).lowest;
    group.each([&](int lane) {
      Report& report = *signals.report;
      if (lane != named || report.status != CGX_OK) return;
      report.rank = named;
      report.exchange = number;
      report.ours = signals.notice;
      // A late peer may be writing it.
      if (peers[lane].failure != CGX_TIMEOUT) report.theirs = mailbox_of(named).notice;
      Memory::store_release(&report.status, peers[lane].failure);
    });
  }
  group.each([&](int lane) {
    if (lane == 0) *signals.fault = kFailedAndNotified;
    if (lane >= size || lane == rank) return;
    Mailbox* const mine = &signals.at_peer[lane][rank];  // in region 0; region 1 is `size` further
    Memory::store_release(&mine[size - region].exchange, kGaveUp | number);
    if (!disagrees) Memory::store_release(&mine[region].exchange, kGaveUp | number);
  });
}

}  // namespace cgx::device::cuda
