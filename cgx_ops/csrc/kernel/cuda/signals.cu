// The kernel of Signals. It has one warp, so that ranks that share a GPU cannot block each other.
#include "kernel/cuda/exchange.h"
#include "kernel/cuda/launching.cuh"

namespace cgx::device::cuda {
namespace {

struct SystemMemory {
  CGX_LANE static uint64_t load_acquire(const uint64_t* at) {
    uint64_t value;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
  }
  CGX_LANE static void store_release(uint64_t* at, uint64_t value) {
    asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
  }
  CGX_LANE static void store_release(uint32_t* at, uint32_t value) {
    asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
  }
  CGX_LANE static void fence() { __threadfence_system(); }
  CGX_LANE static uint64_t now() {
    uint64_t nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
  }
  CGX_LANE static void pause() { __nanosleep(200); }
};

__global__ void __launch_bounds__(Warp::kLanes)
    run_exchange(const __grid_constant__ Signals signals) {
  Warp group(nullptr);
  exchange<SystemMemory>(group, signals);
}

}  // namespace

void launch(const Signals& signals, void* stream) {
  Signals copy = signals;
  void* arguments[] = {&copy};
  require_success(
      cudaLaunchKernel(reinterpret_cast<const void*>(&run_exchange), dim3(1), dim3(Warp::kLanes),
                       arguments, 0, static_cast<cudaStream_t>(stream)),
      "launching a kernel");
}

void load_signals_kernel() { load_kernel(reinterpret_cast<const void*>(&run_exchange)); }

}  // namespace cgx::device::cuda
