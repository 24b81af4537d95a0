// Declarations shared by the files of libcgx_mpi.so, some with MPI types.
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
  std::atomic<bool> ready = false;  // the members below are set
  // Duplicates of MPI_COMM_WORLD: one for messages addressed by tag, one for MpiPost.
  MPI_Comm world = MPI_COMM_NULL, messages = MPI_COMM_NULL;
  uint64_t number = 0;  // identifies the job; equal on its ranks
};

const MpiJob& mpi_job();
bool mpi_finalized();
void require_mpi();  // throws Error(CGX_SYSTEM) if MPI has been finalized
std::string mpi_text(int code);
void check_mpi(int code, const char* call);  // throws Error(CGX_SYSTEM) unless the call succeeded
// Records that some messages may never end, so that MPI_Finalize may wait forever.
void mpi_leave_behind();

std::unique_ptr<Connector> make_connector_of_job(int rank);  // null if MPI is not initialized
std::unique_ptr<MpiMessages> make_messages_of_job();

}  // namespace cgx
