// All kernels of one CPU target. Each kernels_<target>.cc defines CGX_TARGET, its namespace, and
// includes this file, the same source with another instruction set.
//
// Nothing here may leave a function behind that the linker could merge with another target's: all
// of it is internal to the file that includes it, shared helpers are always inlined, and the
// standard library's functions are not called.
#pragma once

#if !defined(CGX_TARGET)
#error "define CGX_TARGET as the target's name before including kernels-inl.h"
#endif

#include "kernel/cpu/exact-inl.h"
#include "kernel/cpu/targets.h"
#include "kernel/cpu/uniform-inl.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

constexpr Kernels table(const char* name, const char* description) {
  return {.name = name,
          .description = description,
          .quantize = quantize,
          .quantize_keeping = quantize_keeping,
          .dequantize = dequantize,
          .dequantize_add = dequantize_add,
          .convert = convert,
          .add = add,
          .add_two = add_two,
          .combine = combine,
          .divide = divide,
          .subtract = subtract,
          .scale = scale};
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
