// The transports, in order of preference. A new one is a file beside this and a row here.
#include "transport/transport.h"

namespace cgx {

const std::vector<TransportEntry>& transport_table() {
  static const std::vector<TransportEntry> table = {
      {"thread", "ranks are threads of one process; peers' memory is read in place", "",
       make_thread_connector},
      {"shm", "ranks are processes of one host; memory without a name, mapped by peers", "SHM",
       make_shm_connector},
      {"hybrid", "several hosts: shm within each, mpi between them", "", make_hybrid_connector},
      {"mpi", "whatever MPI reaches: TCP, UCX, RoCE, InfiniBand; fragmented messages", "MPI",
       make_mpi_connector},
  };
  return table;
}

}  // namespace cgx
