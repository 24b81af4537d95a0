// The functions of cgx.h, section 5. They need no communicator. Buffers that a step does not use
// may be null.
#include "algorithm/carried.h"

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include "api/api.h"
#include "device/addresses.h"
#include "device/carried.h"
#include "traffic.h"

namespace {

using namespace cgx;

Carried make_carried(const cgx_carried_t* carried, BuffersUsed used) {
  check_struct(carried, "cgx_carried_t");
  check_struct(carried->call, "cgx_collective_t");
  // A single rank sends nothing: decode copies input to output.
  if (carried->size == 1) used.input = used.output;
  return {*carried->call, carried->rank, carried->size, used};
}

// Multiplies the bytes for each peer by their number.
int64_t to_peers(const cgx_carried_t& carried, int64_t bytes) { return (carried.size - 1) * bytes; }

// A device's part of the bytes of its rank.
int64_t part_of(const cgx_carried_t& carried, int64_t bytes) {
  return bytes / std::max(carried.devices, 1);
}

// Counts a call whose encoded messages have `bytes` with their padding.
void count(const cgx_carried_t& carried, const Carried& made, int64_t bytes) {
  int64_t sent = to_peers(carried, bytes);
  if (!made.one_shot()) {
    const std::vector<int64_t> at = made.encoded_at();
    sent = bytes - (at[carried.rank + 1] - at[carried.rank]);  // room for this rank is not sent
  }
  Traffic::carried().add(1, part_of(carried, made.plan().bytes_in()),
                         part_of(carried, made.plan().bytes_plain()), part_of(carried, sent));
}

// Checks a caller's buffer. Void may be const.
template <typename Void>
auto bytes_at(Void* buffer, int64_t bytes, const char* what) {
  using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
  require(bytes >= 0, CGX_INVALID_ARGUMENT, what, " has ", bytes, " bytes; pass its size");
  return std::span<Byte>(static_cast<Byte*>(buffer), bytes);
}

// Runs a step: on_cpu(), or on_gpu(steps, queue) for CUDA calls. `buffers` are the step's messages.
template <typename OnCpu, typename OnGpu>
void run(const cgx_collective_t& call, const Carried& made,
         std::initializer_list<std::pair<const char*, const void*>> buffers, const OnCpu& on_cpu,
         const OnGpu& on_gpu) {
  if (call.device == CGX_CPU) return on_cpu();
  refuse_forked();
  const device::CarriedSteps steps(made);
  const void* first = device::first_buffer(call);
  for (const auto& [name, buffer] : buffers) first = first ? first : buffer;
  device::Device& device = device::device_of(first);
  const auto current = device.make_current();  // once, for all operations below
  device::check_addresses(call, device);
  for (const auto& [name, buffer] : buffers)
    if (buffer) device.check_address(buffer, {name});
  on_gpu(steps, *device.wrap(call.stream));
}

}  // namespace

cgx_status_t cgx_carried_plan(const cgx_carried_t* carried, int32_t* algorithm,
                              int64_t* scatter_bytes, int64_t* gather_bytes) {
  return guarded_arithmetic([&] {
    const Carried made = make_carried(carried, {.input = false, .output = false});
    if (carried->call->device == CGX_CUDA) device::CarriedSteps{made};  // throws if unsupported
    require(algorithm && scatter_bytes && gather_bytes, CGX_INVALID_ARGUMENT,
            "algorithm, scatter_bytes or gather_bytes is a null pointer; pass one int32 and two "
            "arrays of `size` int64");
    *algorithm = made.plan().algorithm;
    for (int32_t rank = 0; rank < carried->size; ++rank) {
      scatter_bytes[rank] = made.scatter_bytes(rank);
      gather_bytes[rank] = made.gather_bytes(rank);
    }
  });
}

cgx_status_t cgx_carried_encode(const cgx_carried_t* carried, void* messages, int64_t bytes) {
  return guarded_arithmetic([&] {
    const Carried made = make_carried(carried, {.input = true, .output = false});
    const auto to = bytes_at(messages, bytes, "messages");
    run(
        *carried->call, made, {{"messages", messages}}, [&] { made.encode(to); },
        [&](const auto& steps, auto& queue) { steps.encode(queue, to); });
    count(*carried, made, bytes);
  });
}

cgx_status_t cgx_carried_reduce(const cgx_carried_t* carried, const void* arrived,
                                int64_t arrived_bytes, void* message, int64_t message_bytes) {
  return guarded_arithmetic([&] {
    const Carried made = make_carried(carried, {.input = true, .output = false});
    const auto from = bytes_at(arrived, arrived_bytes, "arrived");
    const auto to = bytes_at(message, message_bytes, "message");
    run(
        *carried->call, made, {{"arrived", arrived}, {"message", message}},
        [&] { made.reduce(from, to); },
        [&](const auto& steps, auto& queue) { steps.reduce(queue, from, to); });
    Traffic::carried().add_sent(part_of(*carried, to_peers(*carried, message_bytes)));
  });
}

cgx_status_t cgx_carried_decode(const cgx_carried_t* carried, const void* gathered, int64_t bytes) {
  return guarded_arithmetic([&] {
    const Carried made = make_carried(carried, {.input = false, .output = true});
    const auto from = bytes_at(gathered, bytes, "gathered");
    run(
        *carried->call, made, {{"gathered", gathered}}, [&] { made.decode(from); },
        [&](const auto& steps, auto& queue) { steps.decode(queue, from); });
  });
}

cgx_status_t cgx_carried_traffic(cgx_traffic_t* traffic) {
  return guarded([&] {
    check_struct(traffic, "cgx_traffic_t");
    *traffic = {traffic->struct_size, 0, 0, 0, 0};
    Traffic::carried().add_to(traffic);
  });
}
