// The kernels' launch functions: each puts one launch on a stream (a cudaStream_t) of the device
// that is current, and returns. Throw Error(CGX_SYSTEM) with CUDA's words. No CUDA header.
#pragma once

#include "kernel/cuda/launches.h"

namespace cgx::device::cuda {

// A launch without a value is none.
void launch(const Encode& encode, void* stream);
void launch(const Reduce& reduce, void* stream);
void launch(const Decode& decode, void* stream);
void launch(const Signals& signals, void* stream);

// Loads every kernel onto the current device. To be called before the first launch there: CUDA
// would load a kernel at its first launch, and that can wait until the device is idle, which it
// is not while Signals waits for a peer.
void load_kernels();

}  // namespace cgx::device::cuda
