// Connects all ranks of a communicator by TCP. Each rank dials the lower ranks at the addresses
// that they offered, and accepts the higher ranks. A handshake authenticates every connection.
//
// Unauthenticated connections (port scans, ranks of other jobs) are closed and counted. Only a few
// may wait at a time, for a few seconds. Listeners are closed when all ranks are connected.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

#include "base/bytes.h"
#include "base/siphash.h"
#include "transport/file_descriptor.h"
#include "transport/tcp_socket.h"
#include "transport/transport.h"

namespace cgx {

// Sent to all ranks by the bootstrap, which is trusted.
struct TcpOffer {
  SipKey share;                            // this rank's share of the communicator's key, which
                                           // combines all shares
  std::array<SocketAddress, 8> addresses;  // where it listens; terminated by an empty address

  static TcpOffer read(std::span<const std::byte> bytes);
};

class TcpRendezvous {
 public:
  // Starts to listen.
  explicit TcpRendezvous(int rank);
  TcpOffer offer() const { return offer_; }

  struct Connected {
    std::vector<FileDescriptor> connections;  // by rank; unset for ranks that were not to be
                                              // reached
    int64_t rejected_connections;             // connections without a valid proof
  };
  // Throws Error(CGX_SYSTEM), which lists the missing ranks and the reasons.
  Connected connect(const std::vector<TcpOffer>& offers, const Reach& reach);

 private:
  const int rank_;
  TcpOffer offer_{};
  std::vector<FileDescriptor> listeners_;
};

}  // namespace cgx
