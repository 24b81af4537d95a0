// A collective in flight, as torch.distributed sees it.
//
//   start()      hands a collective to the core and returns its Work: of CPU tensors that of
//                work.cc, of CUDA tensors that of cuda.h
//   wait()       drives the collective's progress, so it goes to the core
//   getFuture()  asks the core to say when the collective ends; the future is completed on a thread
//                of its own, because its callbacks may wait for other collectives
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "cgx/cgx.h"

namespace cgx::torch_ops {

// What a collective works on, and what is done when it has ended well.
struct Buffers {
  at::Tensor input;   // contiguous; kept alive until the end
  at::Tensor output;  // contiguous; perhaps the input
  // Contiguous; read and written: one for each segment, or one in which they lie end to end.
  std::vector<at::Tensor> residuals = {};
  std::vector<at::Tensor> results = {};  // what the caller sees; empty: the output
  std::function<void()> deliver =
      nullptr;           // moves values from output to results, where they differ
  at::Tensor seed = {};  // perhaps; in the GPU's memory
};

// torch's names of a cgx_verb_t: in c10d, and in profiles.
struct TorchVerb {
  c10d::OpType type;
  const char* name;
};
TorchVerb torch_verb(int32_t verb);

// Starts `collective`, whose input and output are those of `buffers`. Throws if it cannot start.
// Not asynchronous: CUDA tensors on the current stream; of CPU tensors the caller has to wait.
c10::intrusive_ptr<c10d::Work> start(const cgx_collective_t& collective, Buffers buffers,
                                     c10d::OpType type = c10d::OpType::ALLREDUCE,
                                     bool asynchronous = true);

// The name under which the profiler shows a collective: what it is, bits or compressors, bytes of
// the tensors and bytes that this rank sends. "cgx:all_reduce 4 bits, 4000 -> 540 bytes". Costs a
// plan. Valid for ever: profilers keep views of it.
const char* profile_title(const cgx_collective_t& collective);

}  // namespace cgx::torch_ops
