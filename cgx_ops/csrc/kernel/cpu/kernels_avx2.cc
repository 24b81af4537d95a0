// x86-64 with AVX2.
#define CGX_TARGET avx2
#include "kernel/cpu/kernels-inl.h"

namespace cgx::cpu {

const Kernels kAvx2 = avx2::table("avx2", "x86-64 with AVX2");

}  // namespace cgx::cpu
