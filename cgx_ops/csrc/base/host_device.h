// For code that is compiled for the processor and, in .cu files, for the GPU too.
//
//   CGX_HD      a function of both. Always inlined: such functions are compiled into files with
//               different instruction sets, and an out-of-line copy could be merged by the linker
//               into a program that cannot run it.
//   CGX_UNROLL  the loop that follows, of at most ten turns, becomes a straight line
//   CGX_ROLLED  it stays a loop on the GPU, whose compiler unrolls even what is seldom run
//
// And sums and products of both.
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

// Rounded each by itself: a GPU's compiler would make one operation of both, as the processor's is
// told not to.
#if defined(__CUDA_ARCH__)
CGX_HD float rounded_sum(float a, float b) { return __fadd_rn(a, b); }
CGX_HD float rounded_product(float a, float b) { return __fmul_rn(a, b); }
#else
CGX_HD float rounded_sum(float a, float b) { return a + b; }
CGX_HD float rounded_product(float a, float b) { return a * b; }
#endif

}  // namespace cgx
