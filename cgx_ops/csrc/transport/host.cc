#include "transport/host.h"

#include <unistd.h>

#include <cstring>
#include <fstream>
#include <string>

namespace cgx {

Host this_host() {
  char name[65] = {}, pid_namespace[64] = {};
  gethostname(name, sizeof(name) - 1);
  if (readlink("/proc/self/ns/pid", pid_namespace, sizeof(pid_namespace) - 1) < 0)
    pid_namespace[0] = '\0';
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  const std::string all = std::string(name) + "|" + boot + "|" + pid_namespace;
  Host host{};
  std::memcpy(host.data(), all.data(), std::min(all.size(), host.size()));
  return host;
}

}  // namespace cgx
