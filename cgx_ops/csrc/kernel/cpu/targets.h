// The CPU targets of this build: one table of kernels each, compiled from the same source for
// different instruction sets. Used by dispatch.cc only.
#pragma once

#include "kernel/kernels.h"

namespace cgx::cpu {

extern const Kernels kBaseline;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#elif defined(__aarch64__)
extern const Kernels kNeon;
#endif

}  // namespace cgx::cpu
