// MPI as the core uses it. The code that calls MPI is the library libcgx_mpi.so. load_mpi.cc opens
// it when a process belongs to an MPI job, so that all other processes load no libmpi.
//
// Both libraries come from one build: C++ objects and exceptions may cross between them.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "transport/mpi_messages.h"
#include "transport/transport.h"

namespace cgx {

// MPI cannot wake a thread: one that waits for MPI sleeps this long between two polls.
constexpr auto kMpiPollInterval = std::chrono::microseconds(100);

struct MpiWorld {
  int rank = 0;
  int size = 1;
};

// One object per process. Throws Error.
class Mpi {
 public:
  virtual ~Mpi() = default;
  // Initializes MPI (thread level MULTIPLE) unless somebody did. Throws if the level is lower.
  virtual MpiWorld start(std::chrono::duration<double> timeout) = 0;
  // Finalizes MPI if start() initialized it. MPI_Finalize may wait for ranks that never come, so it
  // is abandoned after the timeout, and after a failure within a few seconds.
  virtual void finish(bool healthy, std::chrono::duration<double> timeout) = 0;
  // All ranks' blobs of equal size, over MPI_COMM_WORLD; throws when the timeout passes.
  virtual Bytes allgather(const Bytes& mine, std::chrono::duration<double> timeout) = 0;
  // Null while MPI is not up.
  virtual std::unique_ptr<Connector> make_connector(int rank) = 0;
  virtual std::unique_ptr<MpiMessages> make_messages() = 0;
  // First line of MPI_Get_library_version.
  virtual std::string library() = 0;
  // Whether it takes addresses of NVIDIA GPUs' memory: the library's answer once MPI is up, before
  // that the one in its headers.
  virtual bool cuda_aware() = 0;
};

// Whether this process belongs to an MPI job: launched by mpirun, or MPI is already initialized.
// Throws if another MPI library is loaded.
bool mpi_wanted();
// Opens libcgx_mpi.so, and with it libmpi, at the first call. Throws if it cannot, or if another
// MPI library is loaded.
Mpi& open_mpi();
// Null until open_mpi() has returned.
Mpi* opened_mpi();
// Where libmpi is. By default the dynamic linker finds it.
void set_mpi_path(std::string path);

// What libcgx_mpi.so exports. Null if `version` is not its own CGX_VERSION.
constexpr const char* kMpiEntry = "cgx_mpi";
using MpiEntry = Mpi*(const char* version);

}  // namespace cgx
