// A device's memory for other ranks: as a pointer to those of this process, by CUDA IPC to those of
// others.
#pragma once

#include "cuda/device.h"

namespace cgx::device::cuda {

// What one rank tells another: where its memory is.
struct Shared {
  uint64_t memory;  // this_memory_number(): of the host and PID namespace
  int64_t pid;
  cudaUUID_t uuid;   // of the GPU
  uint64_t address;  // in the process
  cudaIpcMemHandle_t handle;

  // Throws Error(CGX_SYSTEM) unless they are of this version and of a rank that can share memory.
  static Shared read(const Bytes& bytes);
  Bytes bytes() const;
  static uint64_t this_memory_number();
};
static_assert(sizeof(Shared) <= 128);
static_assert(std::is_trivially_copyable_v<Shared>);

// A description of memory of allocate(); the address of its first byte. Whoever gives it away must
// keep the memory until all who have opened it have let go.
Bytes share(const CudaDevice& device, const void* address);
// As memory that `device` reads and writes.
Memory open(const CudaDevice& device, const Bytes& shared);

}  // namespace cgx::device::cuda
