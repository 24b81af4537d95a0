// The entry of libcgx_mpi.so: initialization and finalization of MPI, and the all-gather that
// bootstraps the world.
#include "transport/mpi.h"

#include <mpi.h>
// After mpi.h, whose macros it needs.
#include <mpi-ext.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "base/status.h"
#include "cgx/cgx.h"
#include "transport/doorbell.h"
#include "transport/mpi_world.h"

namespace cgx {
namespace {

constexpr auto kFinalizeGrace = std::chrono::seconds(5);

bool started_by_us = false;
bool broken = false;  // a collective call of start() failed, so ranks are out of step
std::atomic<bool> left_behind = false;
MpiJob job;

bool initialized() {
  int flag = 0;
  MPI_Initialized(&flag);
  return flag != 0;
}

// Completes a non-blocking operation, or throws after the timeout.
void complete(MPI_Request* request, const char* call, std::chrono::duration<double> timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (int done = 0;;) {
    check_mpi(MPI_Test(request, &done, MPI_STATUS_IGNORE), call);
    if (done) return;
    require(std::chrono::steady_clock::now() < deadline, CGX_TIMEOUT, call, " did not end within ",
            timeout.count(), " s: a rank of the MPI job has not called cgx, or has died");
    std::this_thread::sleep_for(kMpiPollInterval);
  }
}

// MPI_Finalize unlinks Open MPI's shared-memory files. If it did not complete, unlink them here:
// this process's own, and those of peers that it has mapped.
void remove_shared_files() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const auto at = line.find("/dev/shm/sm_segment.");
    if (at != std::string::npos) unlink(line.c_str() + at);
  }
}

}  // namespace

std::string mpi_text(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  return {text, static_cast<size_t>(length)};
}

void check_mpi(int code, const char* call) {
  if (code != MPI_SUCCESS) fail(CGX_SYSTEM, call, " failed: ", mpi_text(code));
}

bool mpi_finalized() {
  int flag = 0;
  MPI_Finalized(&flag);
  return flag != 0;
}

void require_mpi() {
  require(!mpi_finalized(), CGX_SYSTEM,
          "MPI was finalized while cgx was using it: call cgx_finalize, or close all "
          "communicators, before MPI_Finalize");
}

const MpiJob& mpi_job() { return job; }

void mpi_leave_behind() { left_behind = true; }

namespace {

class OpenMpi final : public Mpi {
 public:
  MpiWorld start(std::chrono::duration<double> timeout) override;
  void finish(bool healthy, std::chrono::duration<double> timeout) override;
  Bytes allgather(const Bytes& mine, std::chrono::duration<double> timeout) override;
  std::unique_ptr<Connector> make_connector(int rank) override {
    return make_connector_of_job(rank);
  }
  std::unique_ptr<MpiMessages> make_messages() override { return make_messages_of_job(); }
  std::string library() override;
  bool cuda_aware() override;
};

MpiWorld OpenMpi::start(std::chrono::duration<double> timeout) {
  require(!mpi_finalized(), CGX_SYSTEM,
          "MPI was finalized in this process: initialize cgx before MPI_Finalize");
  int level = 0;
  if (initialized()) {
    MPI_Query_thread(&level);
  } else {
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    started_by_us = true;
  }
  require(level == MPI_THREAD_MULTIPLE, CGX_SYSTEM, "MPI was initialized with thread level ", level,
          ", but cgx needs MPI_THREAD_MULTIPLE (", MPI_THREAD_MULTIPLE,
          "): initialize MPI with it, or let cgx initialize MPI");
  MpiWorld mine;
  MPI_Comm_rank(MPI_COMM_WORLD, &mine.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &mine.size);
  require(!broken, CGX_SYSTEM,
          "an earlier attempt to start cgx over MPI failed in this process: restart the job");
  if (job.ready) return mine;
  broken = true;  // until it succeeds
  MPI_Request request;
  for (MPI_Comm* comm : {&job.world, &job.messages}) {
    check_mpi(MPI_Comm_idup(MPI_COMM_WORLD, comm, &request), "MPI_Comm_idup");
    complete(&request, "MPI_Comm_idup", timeout);
    MPI_Comm_set_errhandler(*comm, MPI_ERRORS_RETURN);
  }
  if (mine.rank == 0)
    job.number = static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  check_mpi(MPI_Ibcast(&job.number, 1, MPI_UINT64_T, 0, job.world, &request), "MPI_Ibcast");
  complete(&request, "MPI_Ibcast", timeout);
  job.ready = true;
  broken = false;
  return mine;
}

void OpenMpi::finish(bool healthy, std::chrono::duration<double> timeout) {
  if (!started_by_us || mpi_finalized()) return;
  const bool sound = healthy && !left_behind;
  // If MPI_Finalize blocks, its thread is abandoned and ends with the process.
  auto done = std::make_shared<Doorbell>();
  const uint32_t seen = done->count.load();
  std::thread([done, sound] {
    if (sound && job.ready)
      for (MPI_Comm* comm : {&job.world, &job.messages}) MPI_Comm_free(comm);
    MPI_Finalize();
    done->ring();
  }).detach();
  const auto deadline = std::chrono::steady_clock::now() +
                        std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                            sound ? timeout : kFinalizeGrace);
  while (done->count.load() == seen && std::chrono::steady_clock::now() < deadline)
    done->sleep(seen, std::chrono::milliseconds(100));
  if (!sound || done->count.load() == seen) remove_shared_files();
}

Bytes OpenMpi::allgather(const Bytes& mine, std::chrono::duration<double> timeout) {
  int size = 1;
  MPI_Comm_size(job.world, &size);
  struct Buffers {
    Bytes mine, all;
  };
  auto buffers = std::make_unique<Buffers>(Buffers{mine, Bytes(mine.size() * size)});
  MPI_Request request;
  const int bytes = static_cast<int>(mine.size());
  check_mpi(MPI_Iallgather(buffers->mine.data(), bytes, MPI_BYTE, buffers->all.data(), bytes,
                           MPI_BYTE, job.world, &request),
            "MPI_Iallgather");
  try {
    complete(&request, "MPI_Iallgather", timeout);
  } catch (const Error&) {
    buffers.release();  // NOLINT: MPI may still use them
    broken = true;
    throw;
  }
  return std::move(buffers->all);
}

std::string OpenMpi::library() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  std::string line(text, static_cast<size_t>(length));
  return line.substr(0, line.find_first_of(",\n"));
}

bool OpenMpi::cuda_aware() {
#if defined(OMPI_HAVE_MPI_EXT_CUDA) && OMPI_HAVE_MPI_EXT_CUDA
  return initialized() && !mpi_finalized() ? MPIX_Query_cuda_support() != 0
                                           : MPIX_CUDA_AWARE_SUPPORT != 0;
#else
  return false;
#endif
}

}  // namespace
}  // namespace cgx

extern "C" CGX_API cgx::Mpi* cgx_mpi(const char* version) {
  static cgx::OpenMpi mpi;
  return version == std::string(CGX_VERSION) ? &mpi : nullptr;
}
