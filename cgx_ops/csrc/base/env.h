// Environment variables: typed readers, and the variables of the core. No other file of the core
// reads the environment. For invalid values they throw Error(CGX_INVALID_ARGUMENT) with the
// variable, its value and the accepted values. Empty variables count as unset.
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

// One of `choices`, ignoring case. Returned in the spelling of `choices`.
std::string env_choice(const char* name, const std::vector<std::string>& choices,
                       const std::string& otherwise);

// CGX_CPU_TARGET: the kernels to use instead of the best ones. kernels() validates it.
std::optional<std::string> env_cpu_target();

// CGX_TIMEOUT: deadline of a collective in seconds. Default 300.
double env_timeout_seconds();

// CGX_FUSION_BUFFER_SIZE_MB, in bytes: the limit on a collective's unread messages. Default 64 MiB.
int64_t env_fusion_buffer_bytes();

// CGX_THREADS: threads of this process for encoding and decoding.
std::optional<int> env_threads();

// Ranks of this job on this host, as set by the launcher (mpirun, torchrun). Default 1.
int env_ranks_on_host();

// CGX_HOST_ID: identifies this rank's host instead of the machine. At most 64 bytes.
std::optional<std::string> env_host_id();

// CGX_SOCKET_IFNAME: the network interfaces that TCP uses.
std::optional<std::string> env_socket_interfaces();

// COMMUNICATOR_TYPE: a transport, or AUTO (default). NCCL applies to GPUs and means AUTO for the
// CPU.
const std::vector<std::string>& communicator_types();
std::string env_transport();

// The world of Open MPI's mpirun, or nullopt without mpirun.
struct MpirunWorld {
  int rank = 0;
  int size = 1;
};
std::optional<MpirunWorld> env_mpirun_world();

}  // namespace cgx
