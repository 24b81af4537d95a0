// Functions of the CUDA driver that the runtime API lacks. They are looked up on first use, so that
// libcgx.so does not link to libcuda and loads on machines without it.
#pragma once

#include <cudaTypedefs.h>

#include "cuda/error.h"

namespace cgx::device::cuda {

struct Driver {
  PFN_cuDeviceGet_v2000 device_get;
  PFN_cuDeviceGetUuid_v11040 device_uuid;
  PFN_cuDevicePrimaryCtxRetain_v7000 retain_primary;
  PFN_cuDevicePrimaryCtxGetState_v7000 primary_state;
  PFN_cuCtxPushCurrent_v4000 push;
  PFN_cuCtxPopCurrent_v4000 pop;
  PFN_cuPointerGetAttributes_v7000 pointer_attributes;
  PFN_cuStreamWaitValue32_v11070 wait_value;
};

// Throws Error(CGX_SYSTEM) if there is no driver or GPU, or the driver is too old. The next call
// tries again.
const Driver& driver();

// Makes a device's context current on this thread while it exists. The caller may be capturing a
// graph: calls that do not touch the captured streams (allocating, waiting for our own streams) are
// permitted, unlike by default.
//
// Uses the driver's context stack instead of cudaSetDevice. The framework has its own CUDA runtime,
// whose current device this runtime does not know and could not restore. Also, cudaSetDevice would
// start a context on the device that it restores.
//
// Does nothing within another Current of the same context on this thread. So a function that makes
// many CUDA calls creates one, and those within are free. Libraries that are called within it must
// restore the context, as NCCL and MPI do.
class Current {
 public:
  explicit Current(CUcontext context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const CUcontext outer_;  // of the Current around this one; null: there is none
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // later the caller's
};

}  // namespace cgx::device::cuda
