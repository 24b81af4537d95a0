// MPI as the core uses it: brought up once per process, asked for its world, taken down at the end.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace cgx {

// MPI has nothing that rings a bell: who waits for it sleeps this long between two looks.
constexpr auto kMpiPollInterval = std::chrono::microseconds(100);

struct MpiWorld {
  int rank = 0;
  int size = 1;
};

// Whether this process belongs to an MPI job: launched by mpirun, or MPI is already initialized.
bool mpi_wanted();
// Initializes MPI (thread level MULTIPLE) unless somebody did. Throws if the level is lower.
MpiWorld mpi_start(std::chrono::duration<double> timeout);
// Finalizes MPI if mpi_start() initialized it. MPI_Finalize may wait for ranks that never come, so
// it is abandoned after the timeout, and after a failure within a few seconds.
void mpi_finish(bool healthy, std::chrono::duration<double> timeout);
// Messages were begun that may never end, and MPI_Finalize may wait for them, too.
void mpi_leave_behind();
// All ranks' blobs of equal size, over MPI_COMM_WORLD; throws when the timeout passes.
Bytes mpi_allgather(const Bytes& mine, std::chrono::duration<double> timeout);
// First line of MPI_Get_library_version.
std::string mpi_library();
// Whether it takes addresses of NVIDIA GPUs' memory: what it says once it is up, before that what
// its headers say.
bool mpi_cuda_aware();

}  // namespace cgx
