// The transports, in order of preference. A new one is a file beside this and a row here.
#include "base/status.h"
#include "base/types.h"
#include "transport/transport.h"

namespace cgx {
namespace {

// Messages of 32 to 256 KiB were measured (benchmarks/README.md): over TCP, longer ones than what
// is sent eagerly take twice as long; in shared memory, those of large tensors are a little faster.
constexpr int64_t kSharedChunkBytes = 4 * kChunkBytes;

}  // namespace

const std::vector<TransportEntry>& transport_table() {
  static const std::vector<TransportEntry> table = {
      {"thread", "ranks are threads of one process; peers' memory is read in place", "",
       kSharedChunkBytes, make_thread_connector},
      {"shm", "ranks are processes of one host; memory without a name, mapped by peers", "SHM",
       kSharedChunkBytes, make_shm_connector},
      {"hybrid", "several hosts: shm within each, mpi between them", "", kChunkBytes,
       make_hybrid_connector},
      {"mpi", "whatever MPI reaches: TCP, UCX, RoCE, InfiniBand; fragmented messages", "MPI",
       kChunkBytes, make_mpi_connector},
      {"hybrid_tcp", "several hosts: shm within each, tcp between them", "", kChunkBytes,
       make_hybrid_tcp_connector},
      {"tcp", "sockets, IPv4 and IPv6, without MPI; connections prove a key", "TCP", kChunkBytes,
       make_tcp_connector},
  };
  return table;
}

const TransportEntry& transport_entry(const std::string& name) {
  for (const auto& entry : transport_table())
    if (entry.name == name) return entry;
  fail(CGX_INTERNAL, "no transport '", name, "'");
}

}  // namespace cgx
