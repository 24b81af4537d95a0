// Functions that launch the kernels: each enqueues a launch on a stream (a cudaStream_t) of the
// current device and returns. They throw Error(CGX_SYSTEM) with CUDA's error text. No CUDA header
// is needed.
#pragma once

#include "kernel/cuda/launches.h"

namespace cgx::device::cuda {

// `processors`: the multiprocessors of the device. Launches without values do nothing.
void launch(const Encode& encode, int processors, void* stream);
void launch(const Reduce& reduce, int processors, void* stream);
void launch(const Decode& decode, int processors, void* stream);
void launch(const Signals& signals, void* stream);

// Loads every kernel onto the current device. Must be called before the first launch there.
// Otherwise CUDA would load a kernel at its first launch, which may wait until the device is idle,
// and it is not while Signals waits for a peer.
void load_kernels();

}  // namespace cgx::device::cuda
