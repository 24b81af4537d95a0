// Selects the kernels: the best that this CPU supports, or those in CGX_CPU_TARGET.
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "kernel/cpu/targets.h"
#include "kernel/kernels.h"

namespace cgx {
namespace {

std::vector<const Kernels*> detect() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("bmi2")) {
    found.push_back(&cpu::kAvx512);
  }
  if (__builtin_cpu_supports("avx2")) found.push_back(&cpu::kAvx2);
#elif defined(__aarch64__)
  found.push_back(&cpu::kNeon);
#endif
  found.push_back(&cpu::kBaseline);
  return found;
}

const Kernels& choose() {
  const std::vector<const Kernels*> available = available_kernels();
  const std::optional<std::string> wanted = env_cpu_target();
  if (!wanted) return *available.front();
  std::string names;
  for (const Kernels* kernels : available) {
    if (*wanted == kernels->name) return *kernels;
    names += (names.empty() ? "" : ", ") + std::string(kernels->name);
  }
  fail(CGX_INVALID_ARGUMENT, "CGX_CPU_TARGET=\"", *wanted, "\": this build and CPU support ", names,
       "; unset it to use the best of them");
}

}  // namespace

std::vector<const Kernels*> available_kernels() {
  static const std::vector<const Kernels*> available = detect();
  return available;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();  // remains unset after an exception, so the next call
                                            // tries again
  return chosen;
}

}  // namespace cgx
