#include "device/addresses.h"

namespace cgx::device {

const void* first_buffer(const cgx_collective_t& call) {
  for (const void* buffer : {call.input, static_cast<const void*>(call.output)})
    if (buffer) return buffer;
  for (int64_t i = 0; call.inputs && i < call.num_segments; ++i)
    if (call.inputs[i] && call.segments[i].numel > 0) return call.inputs[i];
  return nullptr;
}

void check_addresses(const cgx_collective_t& call, Device& device) {
  const auto check = [&](const void* address, const BufferName& what) {
    if (address) device.check_address(address, what);
  };
  // Addresses of empty segments are not used, and may point past the end of an allocation. Those
  // of `checked` are valid.
  const auto check_list = [&](const void* const* list, const char* what,
                              const void* const* checked = nullptr) {
    for (int64_t i = 0; list && i < call.num_segments; ++i)
      if (call.segments[i].numel > 0 && !(checked && checked[i] == list[i]))
        check(list[i], {what, i});
  };
  check(call.input, {"input"});
  if (call.output != call.input) check(call.output, {"output"});
  check(call.device_seeds, {"device_seeds"});
  check(call.device_seed, {"device_seed"});
  check_list(call.inputs, "inputs");
  check_list(call.outputs, "outputs", call.inputs);
  check_list(call.residuals, "residuals");
}

}  // namespace cgx::device
