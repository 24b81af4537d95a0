// aarch64 with Advanced SIMD.
#define CGX_TARGET neon
#include "kernel/cpu/kernels-inl.h"

namespace cgx::cpu {

const Kernels kNeon = neon::table("neon", "aarch64 with Advanced SIMD");

}  // namespace cgx::cpu
