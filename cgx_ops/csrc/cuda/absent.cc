// device/queue.h in a build without CUDA.
#include "base/status.h"
#include "device/queue.h"

namespace cgx::device {

Device& device_of(const void* /*address*/) {
  fail(CGX_UNSUPPORTED,
       "this cgx_ops was built without CUDA and cannot use GPU memory: rebuild it with nvcc on "
       "PATH or in CUDA_HOME, or copy the values to the host");
}

std::string describe_devices() { return R"({"built": null, "driver": null, "devices": []})"; }

}  // namespace cgx::device
