// x86-64 with AVX-512 F, BW, DQ and VL.
#define CGX_TARGET avx512
#include "kernel/cpu/kernels-inl.h"

namespace cgx::cpu {

const Kernels kAvx512 = avx512::table("avx512", "x86-64 with AVX-512 F, BW, DQ and VL, and BMI2");

}  // namespace cgx::cpu
