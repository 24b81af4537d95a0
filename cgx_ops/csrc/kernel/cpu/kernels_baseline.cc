// plain C++ for any processor of this architecture.
#define CGX_TARGET baseline
#include "kernel/cpu/kernels-inl.h"

namespace cgx::cpu {

const Kernels kBaseline =
    baseline::table("baseline", "plain C++ for any processor of this architecture");

}  // namespace cgx::cpu
