// A collective in flight, as a torch.distributed Work.
//
//   start()      starts a collective in the core and returns its Work: work.cc for CPU tensors,
//                cuda.h for CUDA tensors
//   wait()       calls the core, because waiting drives the collective's progress
//   getFuture()  registers a callback with the core. The future completes on another thread,
//                because its callbacks may wait for other collectives
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "cgx/cgx.h"

namespace cgx::torch_ops {

// The memory of a collective, and what happens after it has succeeded.
struct Buffers {
  at::Tensor input;   // contiguous; kept alive until the end
  at::Tensor output;  // contiguous; may be the input
  // Contiguous, updated in place: one per segment, or one that holds all of them.
  std::vector<at::Tensor> residuals = {};
  std::vector<at::Tensor> results = {};     // the tensors that the caller gets; empty: the output
  std::function<void()> deliver = nullptr;  // copies from output to results, if they differ
  at::Tensor seed = {};                     // in GPU memory, or undefined
};

// torch's names of a cgx_verb_t, in c10d and in profiles.
struct TorchVerb {
  c10d::OpType type;
  const char* name;
};
TorchVerb torch_verb(int32_t verb);

// Starts `collective`, whose input and output are those of `buffers`. Throws if it cannot start. If
// not asynchronous, CUDA tensors use the current stream; for CPU tensors the caller must wait.
c10::intrusive_ptr<c10d::Work> start(const cgx_collective_t& collective, Buffers buffers,
                                     c10d::OpType type = c10d::OpType::ALLREDUCE,
                                     bool asynchronous = true);

// Returns the name of a collective for profilers: operation, bits or compressors, bytes of the
// tensors, bytes that this rank sends. Example: "cgx:all_reduce 4 bits, 4000 -> 540 bytes". It
// makes a plan, so call it only while profiling. The text is never freed, since profilers keep
// views of it.
const char* profile_title(const cgx_collective_t& collective);

}  // namespace cgx::torch_ops
