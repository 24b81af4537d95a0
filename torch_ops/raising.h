// Operators that raise the Python exceptions of failures among ranks (status.h).
#pragma once

#include <torch/library.h>

#include <utility>

#include "status.h"

namespace cgx::torch_ops {

// Throws the failure's Python exception, or the failure itself in a process without Python.
[[noreturn]] void raise(const RankFailure& failure);  // library.cc

template <auto operation>
struct Raising;

template <typename Result, typename... Arguments, Result (*operation)(Arguments...)>
struct Raising<operation> {
  static Result call(Arguments... arguments) {
    try {
      return operation(std::forward<Arguments>(arguments)...);
    } catch (const RankFailure& failure) {
      raise(failure);
    }
  }
};

// From torch 2.15 on, operators that Python calls do not use pybind11's exception translators.
template <auto operation>
void impl_raising(torch::Library& library, const char* name) {
  library.impl(name, Raising<operation>::call);
}

}  // namespace cgx::torch_ops
