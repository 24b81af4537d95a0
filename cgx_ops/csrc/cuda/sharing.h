// Sharing a GPU's memory with other ranks: as a pointer within this process, by CUDA IPC with other
// processes.
#pragma once

#include "cuda/device.h"

namespace cgx::device::cuda {

// Describes a rank's memory to another rank.
struct Shared {
  uint64_t memory;  // this_memory_number(): identifies the host and PID namespace
  int64_t pid;
  cudaUUID_t uuid;   // of the GPU
  uint64_t address;  // in the process
  cudaIpcMemHandle_t handle;

  // Throws Error(CGX_SYSTEM) unless the bytes come from the same version and from a rank that can
  // share memory.
  static Shared read(const Bytes& bytes);
  Bytes bytes() const;
};
static_assert(sizeof(Shared) <= 128);
static_assert(std::is_trivially_copyable_v<Shared>);

// Describes memory of allocate(), by its first address. The caller must keep the memory until all
// ranks that opened it have closed it.
Bytes share(const CudaDevice& device, const void* address);
// Opens memory so that `device` can read and write it.
Memory open(const CudaDevice& device, const Bytes& shared);

}  // namespace cgx::device::cuda
