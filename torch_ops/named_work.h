// Works of an inner backend whose errors name the rank that is lost.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace cgx::torch_ops {

// Where gloo's connections break it reports an address ("Connection reset by peer"). The core finds
// out which rank of the same group is lost.
class LossFinder {
 public:
  // comm: of the group. call: what failed, such as "cgx:broadcast".
  LossFinder(int32_t comm, std::string call) : comm_(comm), call_(std::move(call)) {}

  // Returns a DistBackendError that begins with the lost rank; the failure itself if none is found
  // within two seconds, or if it is an error of torch's own, such as a bad argument.
  std::exception_ptr named(std::exception_ptr failure) const;

 private:
  int32_t comm_;
  std::string call_;
};

// The same work, whose failure is passed through the finder.
c10::intrusive_ptr<c10d::Work> with_named_losses(c10::intrusive_ptr<c10d::Work> work,
                                                 LossFinder finder);

}  // namespace cgx::torch_ops
