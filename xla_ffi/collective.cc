// One execution of a collective on one CPU device:
//
//   1. Execute, on a thread of XLA: copies its arguments, and returns a future. It never blocks,
//      since XLA runs independent calls in any order: a call that waits for its peers could hold
//      the thread that other calls need.
//   2. It starts on the communicator of its group, with a key that does not depend on the order of
//      calls (see site.h):
//        among devices     all devices of the group are in this process, each a rank
//        among processes   each process has one device of the group
//        at a rendezvous   a process has several devices of the group (see rendezvous.h)
//   3. The end, on a thread of the core: hands the promise to the pool, whose thread completes it.
#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "call.h"
#include "cgx/cgx.h"
#include "core.h"
#include "groups.h"
#include "handlers.h"
#include "launches.h"
#include "rendezvous.h"
#include "site.h"

namespace cgx::xla {
namespace {

std::atomic<double> local_timeout_s{20};

// One execution of a site by one device.
struct Execution {
  int64_t run;
  int32_t device;
  int64_t partition;
  Site::Place place;
  Site& site;
};

// Returns the message of a call, with its seeds.
Message AsRank(const Call& call, const Execution& execution, std::string key) {
  Message message = AsRank(call.operands(), execution.site.signature(), std::move(key));
  message.noise_rank = static_cast<int32_t>(execution.place.rank);
  message.seeds = call.seeds();
  message.fields.launch = static_cast<int32_t>(execution.run);
  return message;
}

// If a device of the same process is late, it usually has no thread
// (cgx_ops/jax/_src/runtime/threads.py).
constexpr const char* kTooFewThreads =
    ". If many steps were launched without waiting: call jax.block_until_ready at least every 16 "
    "steps, or set PJRT_NPROC to twice the number of CPU devices before JAX starts";

void StartAmongDevices(std::shared_ptr<Call> call, const Execution& execution) {
  Site& site = execution.site;
  Message message =
      AsRank(*call, execution, std::to_string(site.serial()) + "@" + std::to_string(execution.run));
  message.fields.occurrence = site.NextOccurrence(execution.run, execution.partition);
  message.fields.timeout_s = local_timeout_s;
  const int32_t comm = LocalCommunicator("jax-local", execution.place.group->members,
                                         execution.place.rank, execution.run, local_timeout_s);
  Start(message, comm, [call](cgx_status_t status, const std::string& text) {
    CompleteSoon(call, status, status == CGX_TIMEOUT ? text + kTooFewThreads : text);
  });
}

void StartAmongProcesses(std::shared_ptr<Call> call, const Execution& execution, bool alone) {
  const Site& site = execution.site;
  const Group& group = *execution.place.group;
  const std::string name = site.NameOf(group);
  if (!alone) {
    Refuse(group.processes, name, CGX_INVALID_ARGUMENT, kOverlap);
    return CompleteSoon(call, CGX_INVALID_ARGUMENT, kOverlap);
  }
  auto message = std::make_shared<Message>(AsRank(*call, execution, name));
  const auto end = [call = std::move(call)](cgx_status_t status, const std::string& text) {
    CompleteSoon(call, status, text);
  };
  WithProcessCommunicator(
      group.processes, [message, end](int32_t comm, cgx_status_t status, const std::string& text) {
        if (status != CGX_OK) return end(status, text);
        Start(*message, comm, end);
      });
}

void StartAtRendezvous(std::shared_ptr<Call> call, const Execution& execution, bool alone) {
  Site& site = execution.site;
  const auto& [group, rank] = execution.place;
  const int64_t occurrence = site.NextOccurrence(execution.run, execution.partition);
  const auto rendezvous = site.FindRendezvous(execution.run, *group, group->process_of[rank],
                                              occurrence, local_timeout_s);
  if (!alone) rendezvous->Fail(CGX_INVALID_ARGUMENT, kOverlap);
  if (rendezvous->Join(group->place_of[rank], std::move(call)))
    site.ForgetRendezvous(execution.run, *group, occurrence);
}

void StartCall(const std::shared_ptr<Call>& call, const Execution& execution) {
  const Group& group = *execution.place.group;
  if (group.processes.empty()) return StartAmongDevices(call, execution);
  const Site& site = execution.site;
  const bool alone =
      call->Launch(execution.device, execution.run, site.NameOf(group), site.named());
  const auto start = group.hierarchical() ? StartAtRendezvous : StartAmongProcesses;
  start(call, execution, alone);
}

ffi::Future Execute(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary,
                    ffi::RunId run, int32_t device, Site* site) {
  std::shared_ptr<Call> call;
  try {
    const int64_t partition = *GetBuffer<U32Buffer>(args, args.size() - 1).typed_data();
    const Site::Place place = site->Find(partition);
    call = std::make_shared<Call>(args, rets, *site, place);
    ffi::Future future = call->future();
    try {
      StartCall(call, {run.run_id, device, partition, place, *site});
    } catch (const std::exception& error) {  // nothing was started
      CompleteSoon(call, StatusOf(error), error.what());
    }
    return future;
  } catch (const std::exception& error) {
    return Failed(error);
  }
}

}  // namespace

void SetLocalTimeout(double seconds) { local_timeout_s = seconds; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(CollectiveInstantiate, MakeSite<Site>,
                              ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(CollectiveExecute, Execute,
                              ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::State<Site>>());

}  // namespace cgx::xla
