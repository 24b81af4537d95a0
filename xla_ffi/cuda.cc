// One execution of a collective on one GPU:
//
//   Execute runs on the thread of XLA that enqueues a program's work on the device's stream. It
//   enqueues the collective, too, and returns. XLA enqueues work in the same order on every device,
//   so calls match in program order.
//
// It waits for peers only once, when a communicator's first collective connects the devices. XLA
// has a separate thread for each device of a process (for one device: the caller's), so all arrive.
//
// A handler can read only host memory. So the partition is not an operand here, unlike on CPU: it
// is derived from the device's ordinal, its id in JAX, and the mesh's ids in the attributes. Seeds
// stay on the device.
//
// The handlers do not have the trait kCmdBufferCompatible: XLA would record them into a CUDA graph.
// That is possible only if devices are connected directly, which is unknown when handlers are
// registered.
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "call.h"
#include "cgx/cgx.h"
#include "core.h"
#include "groups.h"
#include "handlers.h"
#include "site.h"

namespace cgx::xla {
namespace {

std::map<int32_t, int64_t>& DeviceIds() {
  static auto* ids = new std::map<int32_t, int64_t>;
  return *ids;
}

int64_t DeviceId(int32_t ordinal) {
  const auto found = DeviceIds().find(ordinal);
  if (found == DeviceIds().end()) {
    throw StatusError(CGX_INTERNAL, "the GPU with ordinal " + std::to_string(ordinal) +
                                        " is not registered with cgx_ops.jax: JAX's CUDA backend "
                                        "was started after the first collective");
  }
  return found->second;
}

CudaGroup GroupOf(const Group& group, const Site& site) {
  CudaGroup gpus{{}, group.processes};
  for (const int64_t member : group.members) gpus.devices.push_back(site.devices().at(member));
  return gpus;
}

ffi::Error Execute(CUstream_st* stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary, ffi::RunId run, int32_t ordinal, CudaSite* site) {
  std::string where = "a collective on cuda:" + std::to_string(ordinal);
  try {
    const Site::Place place = site->Find(site->PartitionOf(DeviceId(ordinal)));
    where = site->Describe(place);
    const CudaGroup gpus = GroupOf(*place.group, *site);
    try {
      const Signature& signature = site->signature();
      Message message =
          AsRank(Operands(args, rets, signature), signature, site->NameOf(*place.group));
      message.noise_rank = static_cast<int32_t>(place.rank);
      EnqueueOn(stream, message, SeedsOf(args, signature),
                CudaCommunicator(gpus, place.rank, run.run_id));
    } catch (const std::exception&) {
      Abandon(gpus, place.rank, run.run_id);
      throw;
    }
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    return ToError(error, where + ": ");
  }
}

}  // namespace

void SetCudaDevices(std::map<int32_t, int64_t> ids) { DeviceIds() = std::move(ids); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCollectiveInstantiate, MakeSite<CudaSite>,
                              ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaCollectiveExecute, Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<CUstream_st*>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<CudaSite>>());

}  // namespace cgx::xla
