// Threads as ranks on simulated hosts.
#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "connect.h"
#include "ranks.h"
#include "registry.h"

using Hosts = std::vector<int>;  // by rank

// Threads connected as if each rank were on the given host.
inline Ranks ranks_on(const Hosts& hosts, const std::string& name) {
  std::vector<int32_t> made;
  for (auto& communicator : cgx::connect_local(name, hosts, std::chrono::seconds(60)))
    made.push_back(cgx::Registry::instance().add(std::move(communicator)));
  return Ranks(std::move(made));
}
