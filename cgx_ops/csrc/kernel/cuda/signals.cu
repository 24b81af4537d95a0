// The kernel of Signals. It has one warp, so that ranks that share a GPU cannot block each other.
#include "kernel/cuda/entry_points.h"
#include "kernel/cuda/exchange.h"

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

const void* signals_kernel() { return reinterpret_cast<const void*>(&run_exchange); }

}  // namespace cgx::device::cuda
