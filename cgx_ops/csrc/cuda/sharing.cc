#include "cuda/sharing.h"

#include <unistd.h>

#include <cstring>
#include <optional>

#include "transport/host.h"

namespace cgx::device::cuda {
namespace {

// Returns this process's ordinal of a GPU; nullopt if CUDA_VISIBLE_DEVICES hides it.
std::optional<int> find(const cudaUUID_t& uuid) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CUdevice device = 0;
    cudaUUID_t found{};
    check(driver().device_get(&device, ordinal), "cuDeviceGet");
    check(driver().device_uuid(&found, device), "cuDeviceGetUuid");
    if (std::memcmp(&found, &uuid, sizeof(uuid)) == 0) return ordinal;
  }
  return std::nullopt;
}

void require_access(const CudaDevice& device, int peer) {
  int can = 0;
  check(cudaDeviceCanAccessPeer(&can, device.ordinal(), peer), "cudaDeviceCanAccessPeer");
  require(can != 0, CGX_SYSTEM, device.name(), " cannot access the memory of cuda:", peer,
          ": they have no NVLink, and PCIe does not permit it (nvidia-smi topo -p2p rw shows the "
          "reason); send through the host");
}

// The memory of another rank of this process.
Memory open_here(const CudaDevice& device, int peer, std::byte* address) {
  if (peer != device.ordinal()) {
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error != cudaErrorPeerAccessAlreadyEnabled)
      check(error, "cudaDeviceEnablePeerAccess of ", device.name(), " to cuda:", peer);
    cudaGetLastError();
  }
  return Memory(address, [](std::byte*) {});  // its rank frees it
}

Memory open_handle(const CudaDevice& device, const Shared& shared) {
  void* address = nullptr;
  if (const cudaError_t error =
          cudaIpcOpenMemHandle(&address, shared.handle, cudaIpcMemLazyEnablePeerAccess))
    fail_cuda(error,
              join("cudaIpcOpenMemHandle on ", device.name(), " for memory of process ", shared.pid,
                   " (ranks in containers need one PID and IPC namespace: --pid=host --ipc=host; "
                   "MIG instances and WSL do not support it; otherwise send through the host)"));
  return Memory(static_cast<std::byte*>(address),
                [&device](std::byte* at) { device.release([at] { cudaIpcCloseMemHandle(at); }); });
}

}  // namespace

Shared Shared::read(const Bytes& bytes) {
  Shared shared{};
  require(bytes.size() == sizeof(shared), CGX_SYSTEM, "a peer's description of its GPU memory has ",
          bytes.size(), " bytes, this rank's has ", sizeof(shared),
          ": the ranks run different versions of cgx");
  std::memcpy(&shared, bytes.data(), sizeof(shared));
  require(shared.memory == this_memory_number(), CGX_SYSTEM, "process ", shared.pid,
          " is on another host, or in a container with another host name or PID namespace, so its "
          "GPU memory cannot be opened here. Run containers with --pid=host --uts=host --ipc=host, "
          "or send through the host");
  return shared;
}

Bytes Shared::bytes() const {
  const auto* first = reinterpret_cast<const std::byte*>(this);
  return {first, first + sizeof(*this)};
}

Bytes share(const CudaDevice& device, const void* address) {
  const Current current(device.context());
  Shared shared{};
  shared.memory = this_memory_number();
  shared.pid = getpid();
  shared.uuid = device.uuid();
  shared.address = reinterpret_cast<uint64_t>(address);
  check(cudaIpcGetMemHandle(&shared.handle, const_cast<void*>(address)), "cudaIpcGetMemHandle on ",
        device.name());
  return shared.bytes();
}

Memory open(const CudaDevice& device, const Bytes& bytes) {
  const Shared shared = Shared::read(bytes);
  const Current current(device.context());
  const std::optional<int> peer = find(shared.uuid);
  if (peer && *peer != device.ordinal()) require_access(device, *peer);
  if (shared.pid != getpid()) return open_handle(device, shared);
  require(peer.has_value(), CGX_INTERNAL, "a GPU of this process is not in its list of GPUs");
  return open_here(device, *peer, reinterpret_cast<std::byte*>(shared.address));
}

}  // namespace cgx::device::cuda
