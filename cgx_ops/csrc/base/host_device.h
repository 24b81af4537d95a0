// For code that is compiled for the processor and, in .cu files, for the GPU too.
//
//   CGX_HD      a function of both. Always inlined: such functions are compiled into files with
//               different instruction sets, and an out-of-line copy could be merged by the linker
//               into a program that cannot run it.
//   CGX_UNROLL  the loop that follows, of at most ten turns, becomes a straight line
//   CGX_ROLLED  it stays a loop on the GPU, whose compiler unrolls even what is seldom run
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
