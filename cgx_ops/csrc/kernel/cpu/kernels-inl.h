// All kernels of one CPU target. Each kernels_<target>.cc defines CGX_TARGET, its namespace, and
// includes this file: the same source, compiled for a different instruction set.
//
// The linker must not merge functions of different targets. So everything is internal to the
// including file, shared helpers are always inlined, and functions of the standard library are not
// called.
#pragma once

#if !defined(CGX_TARGET)
#error "define CGX_TARGET as the target's name before including kernels-inl.h"
#endif

#include "kernel/cpu/buckets-inl.h"
#include "kernel/cpu/entropy-inl.h"
#include "kernel/cpu/exact-inl.h"
#include "kernel/cpu/half-inl.h"
#include "kernel/cpu/measure-inl.h"
#include "kernel/cpu/planes-inl.h"
#include "kernel/cpu/rans-inl.h"
#include "kernel/cpu/rotate-inl.h"
#include "kernel/cpu/select-inl.h"
#include "kernel/cpu/targets.h"

namespace cgx::cpu::CGX_TARGET {
namespace {

constexpr Kernels table(const char* name, const char* description) {
  return {.name = name,
          .description = description,
          .quantize = quantize,
          .quantize_keeping = quantize_keeping,
          .dequantize = dequantize,
          .dequantize_add = dequantize_add,
          .measure = measure,
          .convert = convert,
          .convert_keeping = convert_keeping,
          .add = add,
          .add_zero = add_zero,
          .add_two = add_two,
          .combine = combine,
          .divide = divide,
          .subtract = subtract,
          .scale = scale,
          .convert_noisily = convert_noisily,
          .count_from = count_from,
          .indices_from = indices_from,
          .select_largest = select_largest,
          .rotate = rotate,
          .rotate_back = rotate_back,
          .split_planes = split_planes,
          .join_planes = join_planes,
          .count_symbols = count_symbols,
          .rans_encode = rans_encode,
          .rans_decode = rans_decode,
          .survey = survey,
          .entropy_symbols = entropy_symbols,
          .count_low_symbols = count_low_symbols,
          .entropy_values = entropy_values};
}

}  // namespace
}  // namespace cgx::cpu::CGX_TARGET
