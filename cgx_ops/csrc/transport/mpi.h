// The core's interface to MPI. Only the library libcgx_mpi.so calls MPI. load_mpi.cc opens it if
// the process belongs to an MPI job, so that other processes do not load libmpi.
//
// Both libraries come from one build, so C++ objects and exceptions may be passed between them.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "transport/mpi_messages.h"
#include "transport/transport.h"

namespace cgx {

// MPI cannot wake a thread, so waiting threads poll at this interval.
constexpr auto kMpiPollInterval = std::chrono::microseconds(100);

struct MpiWorld {
  int rank = 0;
  int size = 1;
};

// One object per process. All functions throw Error.
class Mpi {
 public:
  virtual ~Mpi() = default;
  // Initializes MPI with MPI_THREAD_MULTIPLE unless it is initialized. Throws if MPI's thread level
  // is lower.
  virtual MpiWorld start(std::chrono::duration<double> timeout) = 0;
  // Finalizes MPI if start() initialized it. MPI_Finalize may wait for lost ranks forever, so it is
  // abandoned after the timeout, or within a few seconds after a failure.
  virtual void finish(bool healthy, std::chrono::duration<double> timeout) = 0;
  // Returns the blobs of all ranks of MPI_COMM_WORLD, which have equal sizes. Throws after the
  // timeout.
  virtual Bytes allgather(const Bytes& mine, std::chrono::duration<double> timeout) = 0;
  // Null if MPI is not initialized.
  virtual std::unique_ptr<Connector> make_connector(int rank) = 0;
  virtual std::unique_ptr<MpiMessages> make_messages() = 0;
  // The first line of MPI_Get_library_version.
  virtual std::string library() = 0;
  // Whether MPI accepts addresses in NVIDIA GPU memory: as MPI reports it at run time or, before
  // MPI is initialized, as its headers do.
  virtual bool cuda_aware() = 0;
};

// Whether this process belongs to an MPI job: mpirun launched it, or MPI is initialized. Throws if
// a different MPI library is loaded.
bool mpi_wanted();
// Opens libcgx_mpi.so and libmpi on the first call. Throws if it cannot, or if a different MPI
// library is loaded.
Mpi& open_mpi();
// Null until open_mpi() has returned.
Mpi* opened_mpi();
// Sets the path of libmpi. By default the dynamic linker searches for it.
void set_mpi_path(std::string path);

// The function that libcgx_mpi.so exports. Returns null if `version` differs from its own
// CGX_VERSION.
constexpr const char* kMpiEntry = "cgx_mpi";
using MpiEntry = Mpi*(const char* version);

}  // namespace cgx
