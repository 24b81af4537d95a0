// All ranks of a communicator find each other by TCP: each dials those before it and awaits those
// after it, at the addresses that they offered, and every connection is proven by a handshake.
//
// Whoever else connects (a port scan, another job's rank) is closed and counted; at most a few are
// kept waiting, for a few seconds. The listeners are closed when the last rank is there.
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

// What a rank tells the others by the bootstrap, which is trusted.
struct TcpOffer {
  SipKey share;                            // of the communicator's key, which is that of all ranks
  std::array<SocketAddress, 8> addresses;  // where it listens; none after the last

  static TcpOffer read(std::span<const std::byte> bytes);
};

class TcpMeeting {
 public:
  // Listens from now on.
  explicit TcpMeeting(int rank);
  TcpOffer offer() const { return offer_; }

  struct Met {
    std::vector<FileDescriptor> connections;  // by rank; none to those that are not reached
    int64_t strangers;                        // connections that proved nothing
  };
  // Throws Error(CGX_SYSTEM), which says whom it did not meet and why.
  Met meet(const std::vector<TcpOffer>& offers, const Reach& reach);

 private:
  const int rank_;
  TcpOffer offer_{};
  std::vector<FileDescriptor> listeners_;
};

}  // namespace cgx
