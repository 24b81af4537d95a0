// TCP sockets as the transport uses them: which addresses this rank offers, listening, dialling,
// and what is set on a connection.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/file_descriptor.h"

struct sockaddr_storage;

namespace cgx {

// Where a rank listens, as it is told to others.
struct SocketAddress {
  enum Family : uint8_t { kNone = 0, kIPv4 = 4, kIPv6 = 6 };
  uint8_t family;
  std::array<uint8_t, 16> ip;         // 4 or 16 bytes of it
  std::array<uint8_t, 2> port_bytes;  // in the network's order, like `ip`
  std::string text() const;           // "10.0.0.1:4000", "[fd00::1]:4000"
};

// Those of the interfaces that CGX_SOCKET_IFNAME chooses; by default of all but loopback and
// Docker's bridges, or of loopback where there is no other. Throws Error(CGX_INVALID_ARGUMENT) if
// none has been chosen.
std::vector<SocketAddress> own_addresses();

// At a port that is free; `address` gets it. Throws Error(CGX_SYSTEM).
FileDescriptor listen_at(SocketAddress* address);
// The next connection of a listener; none if nobody waits. Throws Error(CGX_SYSTEM) if this process
// is short of descriptors.
FileDescriptor accept_at(const FileDescriptor& listener);
// Begins to connect; the socket is writable when that has ended. No descriptor if it cannot begin;
// `why` says so.
FileDescriptor dial(const SocketAddress& address, std::string* why);
// 0, or the error that a connection or an attempt has ended with.
int socket_error(const FileDescriptor& socket);

// For a connection that is up: small messages go at once, and a host that does not answer for
// `silence` is dead.
void prepare_connection(const FileDescriptor& socket, std::chrono::duration<double> silence);
// Bytes that the peer's host has not confirmed yet.
int unconfirmed(const FileDescriptor& socket);

}  // namespace cgx
