// TCP sockets for the transport: local addresses, listening, dialing, and socket options.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/file_descriptor.h"

struct sockaddr_storage;

namespace cgx {

// An address that a rank listens at.
struct SocketAddress {
  enum Family : uint8_t { kNone = 0, kIPv4 = 4, kIPv6 = 6 };
  uint8_t family;
  std::array<uint8_t, 16> ip;         // 4 or 16 bytes are used
  std::array<uint8_t, 2> port_bytes;  // network byte order, as `ip`
  std::string text() const;           // "10.0.0.1:4000", "[fd00::1]:4000"
};

// Returns the addresses of the interfaces that CGX_SOCKET_IFNAME selects. By default these are all
// except for loopback and Docker's bridges, or loopback if there is no other. Throws
// Error(CGX_INVALID_ARGUMENT) if the variable selects none.
std::vector<SocketAddress> own_addresses();

// Listens at a free port and stores it in `address`. Throws Error(CGX_SYSTEM).
FileDescriptor listen_at(SocketAddress* address);
// Accepts a connection. Unset if none is waiting. Throws Error(CGX_SYSTEM) if this process has no
// free descriptors.
FileDescriptor accept_at(const FileDescriptor& listener);
// Starts to connect. The socket becomes writable when the attempt ends. Unset, with the reason in
// `why`, if the attempt cannot start.
FileDescriptor dial(const SocketAddress& address, std::string* why);
// Returns the error of a connection or of an attempt to connect, or 0.
int socket_error(const FileDescriptor& socket);

// Configures an established connection: small messages are sent immediately, and a host that does
// not answer for `silence` counts as dead.
void prepare_connection(const FileDescriptor& socket, std::chrono::duration<double> silence);
// Bytes that the peer's host has not acknowledged.
int unconfirmed(const FileDescriptor& socket);

}  // namespace cgx
