// Sets the floating-point environment of the core: round to nearest even, denormals enabled, no
// traps. Every entry point and thread of the core begins with a FloatMode, because callers differ
// (XLA runs handlers with denormals flushed) and results must not. The destructor restores the
// caller's environment, including exception flags.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace cgx {

class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~FloatMode() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  FloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(kDefault) : "memory");
  }
  ~FloatMode() { asm volatile("msr fpcr, %0" ::"r"(saved_) : "memory"); }
#else
#error "cgx supports x86-64 and aarch64: add this processor's control register to FloatMode"
#endif
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint32_t kDefault = 0x1f80;  // all exceptions masked, no flushing
  uint32_t saved_;
#elif defined(__aarch64__)
  static constexpr uint64_t kDefault = 0;
  uint64_t saved_;
#endif
};

}  // namespace cgx
