#include "transport/tcp_socket.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <set>
#include <sstream>

#include "base/env.h"
#include "base/status.h"

namespace cgx {
namespace {

constexpr int kBacklog = 128;

[[noreturn]] void fail_system(const std::string& what, int error) {
  const bool few = error == EMFILE || error == ENFILE;
  fail(CGX_SYSTEM, what, ": ", std::strerror(error),
       few ? "; close files, or raise the limit of open files (ulimit -n)" : "");
}

// ---- which interfaces ----------------------------------------------------------------------

// Parses CGX_SOCKET_IFNAME, in the syntax of NCCL_SOCKET_IFNAME: prefixes separated by commas. A
// leading "=" means exact names, "^" means all others.
class Interfaces {
 public:
  explicit Interfaces(std::string words) : words_(std::move(words)) {
    std::string list = words_;
    if (list.starts_with('^')) {
      excluded_ = true;
      list.erase(0, 1);
    }
    if (list.starts_with('=')) {
      whole_ = true;
      list.erase(0, 1);
    }
    std::istringstream in(list);
    for (std::string name; std::getline(in, name, ',');)
      if (!name.empty()) names_.push_back(name);
  }
  const std::string& words() const { return words_; }
  bool choose(const std::string& interface) const {
    const bool listed = std::any_of(names_.begin(), names_.end(), [&](const std::string& name) {
      return whole_ ? interface == name : interface.starts_with(name);
    });
    return listed != excluded_;
  }

 private:
  std::string words_;
  std::vector<std::string> names_;
  bool excluded_ = false, whole_ = false;
};

struct Found {
  std::string interface;
  SocketAddress address;
};

SocketAddress to_address(const sockaddr* from) {
  SocketAddress address{};
  if (from->sa_family == AF_INET) {
    const auto& v4 = *reinterpret_cast<const sockaddr_in*>(from);
    address.family = SocketAddress::kIPv4;
    std::memcpy(address.ip.data(), &v4.sin_addr, sizeof(v4.sin_addr));
    std::memcpy(address.port_bytes.data(), &v4.sin_port, sizeof(v4.sin_port));
  } else if (from->sa_family == AF_INET6) {
    const auto& v6 = *reinterpret_cast<const sockaddr_in6*>(from);
    address.family = SocketAddress::kIPv6;
    std::memcpy(address.ip.data(), &v6.sin6_addr, sizeof(v6.sin6_addr));
    std::memcpy(address.port_bytes.data(), &v6.sin6_port, sizeof(v6.sin6_port));
  }
  return address;
}

// The addresses of all interfaces that are up, without link-local ones.
std::vector<Found> all_addresses() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) fail_system("cannot list the network interfaces of this host", errno);
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  std::vector<Found> found;
  for (const ifaddrs* at = list; at; at = at->ifa_next) {
    if (!at->ifa_addr || !(at->ifa_flags & IFF_UP)) continue;
    const SocketAddress address = to_address(at->ifa_addr);
    if (address.family == SocketAddress::kNone) continue;
    const bool link_local = address.family == SocketAddress::kIPv6 && address.ip[0] == 0xfe &&
                            (address.ip[1] & 0xc0) == 0x80;
    if (!link_local) found.push_back({at->ifa_name, address});
  }
  return found;
}

std::vector<SocketAddress> chosen(const std::vector<Found>& all, const Interfaces& interfaces) {
  std::vector<SocketAddress> addresses;
  for (const auto& [name, address] : all)
    if (interfaces.choose(name)) addresses.push_back(address);
  return addresses;
}

// ---- kernel addresses -----------------------------------------------------------------------

struct KernelAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

KernelAddress to_kernel(const SocketAddress& address) {
  KernelAddress kernel;
  if (address.family == SocketAddress::kIPv4) {
    auto& v4 = reinterpret_cast<sockaddr_in&>(kernel.storage);
    v4.sin_family = AF_INET;
    std::memcpy(&v4.sin_addr, address.ip.data(), sizeof(v4.sin_addr));
    std::memcpy(&v4.sin_port, address.port_bytes.data(), sizeof(v4.sin_port));
    kernel.length = sizeof(v4);
  } else {
    auto& v6 = reinterpret_cast<sockaddr_in6&>(kernel.storage);
    v6.sin6_family = AF_INET6;
    std::memcpy(&v6.sin6_addr, address.ip.data(), sizeof(v6.sin6_addr));
    std::memcpy(&v6.sin6_port, address.port_bytes.data(), sizeof(v6.sin6_port));
    kernel.length = sizeof(v6);
  }
  return kernel;
}

FileDescriptor stream_socket(const SocketAddress& address) {
  const int family = address.family == SocketAddress::kIPv4 ? AF_INET : AF_INET6;
  return FileDescriptor(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

void set(const FileDescriptor& socket, int level, int option, int value) {
  setsockopt(socket.get(), level, option, &value, sizeof(value));  // optional: errors are ignored
}

}  // namespace

std::string SocketAddress::text() const {
  char ip_text[INET6_ADDRSTRLEN] = "?";
  const bool v4 = family == kIPv4;
  inet_ntop(v4 ? AF_INET : AF_INET6, ip.data(), ip_text, sizeof(ip_text));
  const int port = port_bytes[0] << 8 | port_bytes[1];
  return v4 ? join(ip_text, ":", port) : join("[", ip_text, "]:", port);
}

std::vector<SocketAddress> own_addresses() {
  const std::vector<Found> all = all_addresses();
  if (const auto words = env_socket_interfaces()) {
    const Interfaces asked(*words);
    std::vector<SocketAddress> addresses = chosen(all, asked);
    std::set<std::string> each;
    for (const auto& [name, address] : all) each.insert(name);
    std::string names;
    for (const std::string& name : each) names += join(names.empty() ? "" : ", ", name);
    require(!addresses.empty(), CGX_INVALID_ARGUMENT, "CGX_SOCKET_IFNAME=\"", asked.words(),
            "\" selects no interface that is up and has an address; interfaces: ", names);
    return addresses;
  }
  std::vector<SocketAddress> addresses = chosen(all, Interfaces("^lo,docker"));
  if (addresses.empty()) addresses = chosen(all, Interfaces("lo"));
  require(!addresses.empty(), CGX_SYSTEM,
          "no network interface of this host is up and has an address");
  return addresses;
}

FileDescriptor listen_at(SocketAddress* address) {
  FileDescriptor listener = stream_socket(*address);
  const auto check = [&](int result) {
    if (result < 0) fail_system("cannot listen at " + address->text(), errno);
  };
  check(listener.get());
  if (address->family == SocketAddress::kIPv6) set(listener, IPPROTO_IPV6, IPV6_V6ONLY, 1);
  KernelAddress kernel = to_kernel(*address);
  check(bind(listener.get(), kernel.get(), kernel.length));
  check(listen(listener.get(), kBacklog));
  check(getsockname(listener.get(), kernel.get(), &kernel.length));
  *address = to_address(kernel.get());
  return listener;
}

FileDescriptor accept_at(const FileDescriptor& listener) {
  FileDescriptor socket(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket.get() < 0 && (errno == EMFILE || errno == ENFILE))
    fail_system("cannot accept a connection", errno);
  return socket;
}

FileDescriptor dial(const SocketAddress& address, std::string* why) {
  FileDescriptor socket = stream_socket(address);
  if (socket.get() < 0) {
    // An unsupported address family is a failure of this attempt only.
    if (errno != EAFNOSUPPORT) fail_system("cannot create a socket", errno);
    *why = std::strerror(errno);
    return socket;
  }
  KernelAddress kernel = to_kernel(address);
  if (connect(socket.get(), kernel.get(), kernel.length) == 0 || errno == EINPROGRESS)
    return socket;
  *why = std::strerror(errno);
  return FileDescriptor();
}

int socket_error(const FileDescriptor& socket) {
  int error = 0;
  socklen_t length = sizeof(error);
  return getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
}

void prepare_connection(const FileDescriptor& socket, std::chrono::duration<double> silence) {
  constexpr double kMostSeconds = 24 * 3600;
  constexpr int kProbes = 4;
  const double seconds = std::min(silence.count(), kMostSeconds);
  const int interval = std::max(1, static_cast<int>(seconds / kProbes));
  set(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  // Keep-alive detects a dead host while nothing is in flight. Data in flight is covered by the
  // collectives' deadlines. TCP_USER_TIMEOUT is not used: it would also end connections to a rank
  // that reads nothing for a while, because it computes.
  set(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(socket, IPPROTO_TCP, TCP_KEEPIDLE, interval);
  set(socket, IPPROTO_TCP, TCP_KEEPINTVL, interval);
  set(socket, IPPROTO_TCP, TCP_KEEPCNT, kProbes - 1);
}

int unconfirmed(const FileDescriptor& socket) {
  int bytes = 0;
  return ioctl(socket.get(), SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

}  // namespace cgx
