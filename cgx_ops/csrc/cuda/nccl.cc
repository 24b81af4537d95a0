#include "cuda/nccl.h"

#include <dlfcn.h>

#include <cstring>
#include <thread>
#include <utility>

namespace cgx::device::cuda {
namespace {

// ---- declarations of nccl.h ---------------------------------------------------------------------

constexpr char kLibrary[] = "libnccl.so.2";
constexpr int kOldest = 21800;  // 2.18: can abort while connecting

enum Result { kSuccess = 0, kRemoteError = 6, kInProgress = 7 };
constexpr int kInt8 = 0;

struct Comm;
struct UniqueId {
  char internal[128];
};
// As of 2.14. NCCL reads `size` bytes, and uses defaults for fields newer than `version`.
struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21400;
  int blocking = 0;
};

// ---- lookup -------------------------------------------------------------------------------------

// 22703: "2.27.3".
std::string text_of_version(int version) {
  return join(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

template <typename Function>
void find_function(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  require(*function != nullptr, CGX_SYSTEM, kLibrary, " has no ", name);
}

}  // namespace

struct Nccl::Functions {
  int (*version)(int*);
  int (*unique_id)(UniqueId*);
  int (*init)(Comm**, int, UniqueId, int, Config*);
  int (*finalize)(Comm*);
  int (*destroy)(Comm*);
  int (*abort)(Comm*);
  int (*async_error)(Comm*, int*);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void*, size_t, int, int, Comm*, cudaStream_t);
  int (*receive)(void*, size_t, int, int, Comm*, cudaStream_t);
  const char* (*error_text)(int);
  const char* (*last_error)(Comm*);
};

Nccl::Nccl() {
  // Prefer the framework's copy to the system's.
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD);
  if (!library) library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  require(library != nullptr, CGX_SYSTEM, "cannot load NCCL: ", dlerror(),
          " (import the framework first, or add NCCL's folder to LD_LIBRARY_PATH)");
  Functions call{};
  find_function(library, "ncclGetVersion", &call.version);
  check(call.version(&version_), "ncclGetVersion");
  require(version_ >= kOldest, CGX_SYSTEM, "NCCL is ", version(), ", but cgx needs ",
          text_of_version(kOldest), " or newer");
  find_function(library, "ncclGetUniqueId", &call.unique_id);
  find_function(library, "ncclCommInitRankConfig", &call.init);
  find_function(library, "ncclCommFinalize", &call.finalize);
  find_function(library, "ncclCommDestroy", &call.destroy);
  find_function(library, "ncclCommAbort", &call.abort);
  find_function(library, "ncclCommGetAsyncError", &call.async_error);
  find_function(library, "ncclGroupStart", &call.group_start);
  find_function(library, "ncclGroupEnd", &call.group_end);
  find_function(library, "ncclSend", &call.send);
  find_function(library, "ncclRecv", &call.receive);
  find_function(library, "ncclGetErrorString", &call.error_text);
  find_function(library, "ncclGetLastError", &call.last_error);
  call_ = std::make_unique<const Functions>(call);
}

const Nccl& Nccl::find() {
  static const Nccl& found = *new Nccl;  // never destroyed: communicators may end with the process
  return found;
}

std::string Nccl::version() const { return text_of_version(version_); }

void Nccl::check(int result, const char* call) const {
  if (result == kSuccess || result == kInProgress) return;
  fail(result == kRemoteError ? CGX_PEER_FAILED : CGX_SYSTEM, call, ": ",
       call_ ? join(call_->error_text(result), " (", call_->last_error(nullptr), ")")
             : join("error ", result));
}

Bytes Nccl::make_id() const {
  UniqueId id{};
  check(call_->unique_id(&id), "ncclGetUniqueId");
  Bytes bytes(sizeof(id));
  std::memcpy(bytes.data(), &id, sizeof(id));
  return bytes;
}

// ---- NcclFabric ---------------------------------------------------------------------------------

void NcclFabric::connect(int rank, int size, const Bytes& id, Seconds timeout) {
  UniqueId same{};
  require(id.size() == sizeof(same), CGX_INTERNAL, "NCCL's id has ", id.size(), " bytes");
  std::memcpy(&same, id.data(), sizeof(same));
  const Current current(device_.context());  // NCCL uses the current device
  Lock lock(mutex_);
  Comm* made = nullptr;
  Config config;
  const int result = nccl_.call_->init(&made, size, same, rank, &config);
  handle_ = made;
  settle(lock, result, "ncclCommInitRankConfig", timeout);
}

void NcclFabric::exchange(std::span<const Message> outgoing, std::span<const Message> incoming,
                          Queue& queue, Seconds timeout) {
  const auto& call = *nccl_.call_;
  auto* stream = static_cast<CudaQueue&>(queue).stream();
  const Current current(device_.context());
  Lock lock(mutex_);
  require_open();
  auto* comm = static_cast<Comm*>(handle_);
  nccl_.check(call.group_start(), "ncclGroupStart");
  int result = kSuccess;  // the first failure; a started group must be ended in any case
  const auto put = [&](auto function, const Message& message) {
    if (result == kSuccess || result == kInProgress)
      result = function(message.at.get(), message.bytes, kInt8, message.peer, comm, stream);
  };
  for (const Message& message : outgoing) put(call.send, message);
  for (const Message& message : incoming) put(call.receive, message);
  const int ended = call.group_end();
  nccl_.check(result, "ncclSend or ncclRecv");
  settle(lock, ended, "ncclGroupEnd", timeout);
}

void NcclFabric::settle(Lock& lock, int result, const char* call, Seconds timeout) {
  constexpr auto kPause = std::chrono::microseconds(50);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  nccl_.check(result, call);
  while (result == kInProgress) {
    require_open();
    nccl_.check(nccl_.call_->async_error(static_cast<Comm*>(handle_), &result), call);
    nccl_.check(result, call);
    if (result == kSuccess) return;
    require(
        std::chrono::steady_clock::now() < deadline, CGX_TIMEOUT, call, " did not end within ",
        timeout.count(),
        " s: a rank is late or lost, or NCCL cannot reach it (set NCCL_DEBUG=INFO for details)");
    lock.unlock();
    std::this_thread::sleep_for(kPause);
    lock.lock();
  }
}

void NcclFabric::require_open() const {
  require(handle_ != nullptr, CGX_CLOSED, "NCCL was aborted");
}

void NcclFabric::check() {
  const Lock lock(mutex_);
  if (!handle_) return;
  int state = kSuccess;
  nccl_.check(nccl_.call_->async_error(static_cast<Comm*>(handle_), &state),
              "ncclCommGetAsyncError");
  nccl_.check(state, "a peer, or the network to it");
}

// Without the lock, because it waits for work on the device, which ends now.
void NcclFabric::abort() {
  Lock lock(mutex_);
  auto* comm = static_cast<Comm*>(std::exchange(handle_, nullptr));
  lock.unlock();
  if (comm) device_.release([&] { nccl_.call_->abort(comm); });
}

void NcclFabric::close(Seconds timeout) {
  const Current current(device_.context());
  Lock lock(mutex_);
  require_open();
  settle(lock, nccl_.call_->finalize(static_cast<Comm*>(handle_)), "ncclCommFinalize",
         timeout);  // otherwise the destructor aborts
  nccl_.check(nccl_.call_->destroy(static_cast<Comm*>(std::exchange(handle_, nullptr))),
              "ncclCommDestroy");
}

}  // namespace cgx::device::cuda
