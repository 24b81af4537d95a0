#include "base/cores.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>

#include "base/env.h"

namespace cgx {
namespace {

int cores_of_host() { return std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN))); }

}  // namespace

int cores_of_rank() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const bool known = sched_getaffinity(0, sizeof(allowed), &allowed) == 0;
  const int share = std::max(1, cores_of_host() / env_ranks_on_host());
  return known ? std::min(CPU_COUNT(&allowed), share) : share;
}

bool crowded() { return env_ranks_on_host() > cores_of_host(); }

}  // namespace cgx
