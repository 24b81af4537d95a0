// The transports, in order of preference. A new one is a file in this folder and a row here.
#include "base/status.h"
#include "base/types.h"
#include "transport/transport.h"

namespace cgx {
namespace {

// Measured for messages of 32 to 256 KiB (benchmarks/README.md). Over TCP, messages longer than the
// eager limit take twice as long. In shared memory, longer messages are slightly faster for large
// tensors.
constexpr int64_t kSharedChunkBytes = 4 * kChunkBytes;

}  // namespace

const std::vector<TransportEntry>& transport_table() {
  static const std::vector<TransportEntry> table = {
      {"thread", "ranks are threads of one process; they read each other's memory in place", "",
       kSharedChunkBytes, true, make_thread_connector},
      {"shm", "ranks are processes of one host; they map each other's unnamed memory files", "SHM",
       kSharedChunkBytes, true, make_shm_connector},
      {"hybrid", "several hosts: shm within each, mpi between them", "", kChunkBytes, false,
       make_hybrid_connector},
      {"mpi", "everything that MPI supports: TCP, UCX, RoCE, InfiniBand; fragmented messages",
       "MPI", kChunkBytes, false, make_mpi_connector},
      {"hybrid_tcp", "several hosts: shm within each, tcp between them", "", kChunkBytes, true,
       make_hybrid_tcp_connector},
      {"tcp", "sockets, IPv4 and IPv6, without MPI; authenticated connections", "TCP", kChunkBytes,
       true, make_tcp_connector},
  };
  return table;
}

const TransportEntry& transport_entry(const std::string& name) {
  for (const auto& entry : transport_table())
    if (entry.name == name) return entry;
  fail(CGX_INTERNAL, "no transport '", name, "'");
}

}  // namespace cgx
