// Collectives of CUDA tensors: the core puts them on a stream, and the host goes on. Neither a
// header nor a library of CUDA is needed for it: streams, events and the allocator are behind c10's
// device guards, which a torch with CUDA registers, and a torch without CUDA makes no such tensors.
//
//   enqueue()       on the current stream, as any kernel
//   start_cuda()    on a stream of the communicator's own, beside the current one, with a Work:
//                   wait() has the then-current stream wait, not the host
//   capturing()     whether what is put on the current stream is recorded into a CUDA graph
//
// What fails on the device is known late: the outputs are NaN, and wait() or the next call throws.
#pragma once

#include <c10/core/Device.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "cgx/cgx.h"
#include "work.h"

namespace cgx::torch_ops {

// `collective` as it is for the CPU, with buffers on `device`. Throws what is wrong with the call,
// and what an earlier one on the communicator failed with.
void enqueue(const cgx_collective_t& collective, at::Device device);

// The same as a Work; `buffers` hold the collective's memory. Not asynchronous: on the current
// stream.
c10::intrusive_ptr<c10d::Work> start_cuda(const cgx_collective_t& collective, Buffers buffers,
                                          c10d::OpType type, bool asynchronous);

bool capturing(at::Device device);

}  // namespace cgx::torch_ops
