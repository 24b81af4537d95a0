// Works of an inner backend whose errors name the lost rank.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace cgx::torch_ops {

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

// Returns the same work, with its failures passed through the finder.
c10::intrusive_ptr<c10d::Work> with_named_losses(c10::intrusive_ptr<c10d::Work> work,
                                                 LossFinder finder);

}  // namespace cgx::torch_ops
