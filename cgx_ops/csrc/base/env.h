// The only place of the core that reads the environment: typed readers, then the variables that the
// core has. A malformed value throws Error(CGX_INVALID_ARGUMENT) that names the variable, its text
// and what is accepted. An empty variable counts as unset.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace cgx {

std::optional<std::string> env_string(const char* name);

// A finite number of seconds greater than 0.
double env_seconds(const char* name, double otherwise);

// An integer in [lowest, highest].
std::optional<int> env_integer(const char* name, int lowest, int highest);

// One of `choices`, whatever its case; returned as `choices` spells it. Unset: `otherwise`.
std::string env_choice(const char* name, const std::vector<std::string>& choices,
                       const std::string& otherwise);

// CGX_CPU_TARGET: the kernels to use instead of the best ones. kernels() checks the name.
std::optional<std::string> env_cpu_target();

// CGX_TIMEOUT: seconds until a waiting collective gives up. 300 if unset.
double env_timeout_seconds();

// CGX_FUSION_BUFFER_SIZE_MB, in bytes: what of a collective peers may leave unread. 64 MiB if
// unset.
int64_t env_fusion_buffer_bytes();

// CGX_THREADS: threads of this process that encode and decode.
std::optional<int> env_threads();

// Ranks of this job on this host, as the launcher (mpirun, torchrun) tells; 1 if it does not.
int env_ranks_on_host();

// CGX_HOST_ID: what stands for this rank's host, instead of the machine. At most 64 bytes.
std::optional<std::string> env_host_id();

// CGX_SOCKET_IFNAME: the network interfaces that TCP listens at and connects to.
std::optional<std::string> env_socket_interfaces();

// COMMUNICATOR_TYPE, as a communicator may also be told: AUTO (if unset) and the one transport to
// use; NCCL is about GPUs, and AUTO for all else.
const std::vector<std::string>& communicator_types();
std::string env_transport();

// The world that Open MPI's mpirun started this process in; nothing without mpirun.
struct MpirunWorld {
  int rank = 0;
  int size = 1;
};
std::optional<MpirunWorld> env_mpirun_world();

}  // namespace cgx
