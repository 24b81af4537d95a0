// Macros for code that is compiled for the CPU and, in .cu files, for GPUs.
//
//   CGX_HD      A function for both. Always inlined: such functions are compiled into files with
//               different instruction sets, and the linker could merge out-of-line copies into a
//               program that cannot run on this CPU.
//   CGX_UNROLL  Unrolls the next loop, of at most ten iterations.
//   CGX_ROLLED  Keeps the next loop rolled on GPUs, whose compiler unrolls even rarely executed
//               loops.
#pragma once

#if defined(__CUDACC__)
#define CGX_HD __host__ __device__ __forceinline__
#define CGX_UNROLL _Pragma("unroll")
#define CGX_ROLLED _Pragma("unroll 1")
#else
#define CGX_HD [[gnu::always_inline]] inline
#define CGX_UNROLL _Pragma("GCC unroll 10")
#define CGX_ROLLED
#endif

namespace cgx {

// Sums and products that the GPU's compiler must not contract to an FMA. The CPU's compiler gets
// -ffp-contract=off.
#if defined(__CUDA_ARCH__)
CGX_HD float rounded_sum(float a, float b) { return __fadd_rn(a, b); }
CGX_HD float rounded_product(float a, float b) { return __fmul_rn(a, b); }
#else
CGX_HD float rounded_sum(float a, float b) { return a + b; }
CGX_HD float rounded_product(float a, float b) { return a * b; }
#endif

}  // namespace cgx
