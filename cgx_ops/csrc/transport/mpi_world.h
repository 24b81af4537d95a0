// Declarations that the files of libcgx_mpi.so share, some in MPI's own types.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "transport/mpi_messages.h"
#include "transport/transport.h"

namespace cgx {

struct MpiJob {
  std::atomic<bool> ready = false;  // what follows is there
  // Our duplicates of MPI_COMM_WORLD: one for what is addressed by tag, one for the post.
  MPI_Comm world = MPI_COMM_NULL, messages = MPI_COMM_NULL;
  uint64_t number = 0;  // equal on the ranks of one job, and only there
};

const MpiJob& mpi_job();
bool mpi_finalized();
void require_mpi();  // throws Error(CGX_SYSTEM) once it is finalized
std::string mpi_text(int code);
void check_mpi(int code, const char* call);  // throws Error(CGX_SYSTEM)
// Messages were begun that may never end, and MPI_Finalize may wait for them, too.
void mpi_leave_behind();

std::unique_ptr<Connector> make_connector_of_job(int rank);  // null while MPI is not up
std::unique_ptr<MpiMessages> make_messages_of_job();

}  // namespace cgx
