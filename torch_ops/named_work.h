// Works of other backends or of the core with more helpful errors.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace cgx::torch_ops {

// Returns the failure to raise instead of the given one. Null: wait() was aborted.
using Rename = std::function<std::exception_ptr(std::exception_ptr)>;

// Finds the lost rank after a gloo failure. gloo only reports an address ("Connection reset by
// peer"), so the finder asks the core's communicator of the same group.
class LossFinder {
 public:
  // `comm` is the group's communicator. `call` names the failed call, such as "cgx:broadcast".
  LossFinder(int32_t comm, std::string call) : comm_(comm), call_(std::move(call)) {}

  // Returns a DistBackendError that begins with the lost rank. Returns the failure unchanged if no
  // lost rank is found within two seconds, or if it is an error of torch itself, such as a bad
  // argument.
  std::exception_ptr named(std::exception_ptr failure) const;

 private:
  int32_t comm_;
  std::string call_;
};

// Returns the same work, with its failures passed through `rename`. `ended`, if given, is called
// once, after a wait() has succeeded.
c10::intrusive_ptr<c10d::Work> with_named_failures(
    c10::intrusive_ptr<c10d::Work> work, Rename rename,
    std::function<void(const c10d::Work&)> ended = nullptr);

}  // namespace cgx::torch_ops
