#include "transport/host.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <span>
#include <string>

#include "base/env.h"
#include "base/hash.h"
#include "base/status.h"

namespace cgx {
namespace {

std::string read_machine() {
  char name[65] = {}, pid_namespace[64] = {};
  gethostname(name, sizeof(name) - 1);
  if (readlink("/proc/self/ns/pid", pid_namespace, sizeof(pid_namespace) - 1) < 0)
    pid_namespace[0] = '\0';
  std::string boot;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  require(file || errno != EMFILE, CGX_SYSTEM,
          "no file descriptor is free to identify this machine: raise the limit of open files "
          "(ulimit -n)");
  std::getline(file, boot);
  return std::string(name) + "|" + boot + "|" + pid_namespace;
}

// Read once. If no descriptor were free later, this rank would appear to be on a different machine.
const std::string& machine() {
  static const std::string text = read_machine();
  return text;
}

Host to_host(const std::string& text) {
  Host host{};
  std::memcpy(host.data(), text.data(), std::min(text.size(), host.size()));
  return host;
}

}  // namespace

Host this_host() {
  const std::optional<std::string> id = env_host_id();
  return to_host(id ? "id|" + *id : machine());
}

Host this_memory() { return to_host(env_host_id().value_or("") + "|" + machine()); }

uint64_t this_memory_number() {
  const Host memory = this_memory();
  return fnv1a(std::as_bytes(std::span(memory)));
}

}  // namespace cgx
