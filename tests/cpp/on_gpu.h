// Helpers of the programs that need a GPU: memory and queues of cuda:0, and begin(), which exits
// with status 77 without a GPU.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "throwing.h"

namespace cgx::test {

using namespace device;
using cuda::CudaDevice;

// The limit for all tests of a program, also under compute-sanitizer.
inline constexpr unsigned int kSeconds = 300;
inline constexpr int kSkipped = 77;  // ctest's SKIP_RETURN_CODE
inline constexpr size_t kBytes = 3 << 20;

inline void check_cuda(cudaError_t error) {
  CHECK(error == cudaSuccess, "%s", cudaGetErrorString(error));
}

inline CudaDevice& gpu() { return CudaDevice::get(0); }

inline Memory pinned(size_t bytes = kBytes) { return gpu().allocate(bytes, Place::kPinned); }
inline Memory on_device(size_t bytes = kBytes) { return gpu().allocate(bytes, Place::kDevice); }

inline void fill(const Memory& memory, int seed, size_t bytes = kBytes) {
  for (size_t i = 0; i < bytes; ++i)
    memory.get()[i] = static_cast<std::byte>(i * 7 + i / 251 + seed);
}

inline void check_filled(const Memory& memory, int seed, size_t bytes = kBytes) {
  for (size_t i = 0; i < bytes; ++i)
    CHECK(memory.get()[i] == static_cast<std::byte>(i * 7 + i / 251 + seed), "byte %zu of %d", i,
          seed);
}

// Copies device memory to pinned memory.
inline Memory fetch(const void* from, size_t bytes = kBytes) {
  Memory to = pinned(bytes);
  const auto queue = gpu().make_queue();
  queue->copy(to.get(), from, bytes);
  queue->synchronize();
  return to;
}

// Blocks a queue until open() is called.
class Gate {
 public:
  void hold(Queue& queue, uint32_t until = 1) { queue.wait_for(word(), until); }
  void open(uint32_t value = 1) { std::atomic_ref(*word()).store(value); }

 private:
  uint32_t* word() const { return reinterpret_cast<uint32_t*>(memory_.get()); }
  Memory memory_ = pinned(sizeof(uint32_t));
};

// Like throws(), and checks that no CUDA error remains.
inline void fails(cgx_status_t status, const std::vector<std::string>& parts,
                  const std::function<void()>& work) {
  throws(status, parts, work);
  CHECK(cudaGetLastError() == cudaSuccess, "cudaGetLastError returns an error");
}

inline void begin() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("no GPU: skipped");
    std::exit(kSkipped);
  }
  alarm(kSeconds);
}

}  // namespace cgx::test
