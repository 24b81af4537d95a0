// Collectives of CUDA tensors. The core enqueues them on a stream, and the host continues. This
// needs no CUDA headers or libraries: c10's device guards provide streams, events and the
// allocator.
//
//   enqueue()       on the current stream, as any kernel
//   start_cuda()    on a stream of the communicator, concurrent with the current one. Returns a
//                   Work, whose wait() blocks the then-current stream, not the host
//   CurrentStream   the current stream, for calls that the caller enqueues itself
//   capturing()     whether the current stream is being captured into a CUDA graph
//
// Failures on the device are reported late: outputs become NaN, and wait() or the next call throws.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "cgx/cgx.h"
#include "work.h"

namespace cgx::torch_ops {

// Takes the same arguments as on the CPU, with buffers on `device`. Throws if the call is invalid,
// or the failure of an earlier collective of the communicator.
void enqueue(const cgx_collective_t& collective, at::Device device);

// The same, as a Work. `buffers` own the collective's memory. If not asynchronous, it uses the
// current stream.
c10::intrusive_ptr<c10d::Work> start_cuda(const cgx_collective_t& collective, Buffers buffers,
                                          c10d::OpType type, bool asynchronous);

// Frees the streams of a communicator that was closed.
void forget_streams(int32_t comm);

// Makes a CUDA device current while it exists. Does nothing on the CPU, where there is no stream.
struct CurrentStream {
  explicit CurrentStream(at::Device device);
  const c10::OptionalDeviceGuard guard;
  void* handle = nullptr;
};

bool capturing(at::Device device);

}  // namespace cgx::torch_ops
