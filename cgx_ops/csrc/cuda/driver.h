// The few functions of the driver that the runtime API lacks. They are looked up when first
// needed, so that libcgx.so has no link to libcuda and loads where there is none.
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

// Throws Error(CGX_SYSTEM) where there is no driver, no GPU, or too old a driver; asks again at the
// next call then.
const Driver& driver();

// Makes a device's context this thread's while it lives. The caller may be recording a graph:
// calls that do not touch what is recorded (allocating, waiting for our own streams) are permitted
// meanwhile, as they are not by default.
//
// By the driver's stack of contexts and not by cudaSetDevice: the framework has a CUDA runtime of
// its own, whose idea of the current device ours does not know and could not restore; and
// cudaSetDevice would start a context on whatever device it restores.
class Current {
 public:
  explicit Current(CUcontext context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // then the caller's
};

}  // namespace cgx::device::cuda
