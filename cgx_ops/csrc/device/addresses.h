// The addresses of a call on a GPU.
#pragma once

#include "cgx/cgx.h"
#include "device/queue.h"

namespace cgx::device {

// The first address of values, which identifies the GPU; null if there is none.
const void* first_buffer(const cgx_collective_t& call);

// Throws Error(CGX_INVALID_ARGUMENT) unless the device can access all addresses of the call. Freed
// or invalid ones would put the device in an error state for the whole process.
void check_addresses(const cgx_collective_t& call, Device& device);

}  // namespace cgx::device
