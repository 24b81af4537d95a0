// How one execution of psum_q goes:
//
//   1. Execute, on a thread of XLA: reads the small operands, copies what it needs of the call
//   frame,
//      which dies with the call, and returns a future. It never waits: XLA runs independent calls
//      in any order, so one that waits for its peers may keep the thread that its peers' peers
//      need.
//   2. Start: cgx_start on the communicator of the group, under a key that does not depend on
//      the order in which calls arrive (see site.h).
//   3. Finish, on a thread of the core: hands the promise to the pool, whose thread completes it.
#include "psum_q.h"

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cgx/cgx.h"
#include "cgx/completion_pool.h"
#include "groups.h"
#include "site.h"

namespace cgx::xla {
namespace {

std::atomic<double> local_timeout_s{0};

// One execution on one device, from Execute to the completed promise.
struct Call {
  ffi::Promise promise;
  cgx_collective_t collective;
  std::vector<cgx_segment_t> segments;
  std::string key;
  std::string where;  // for error messages
};

ffi::ErrorCode ToErrorCode(cgx_status_t status) {
  switch (status) {
    case CGX_OK:
      return ffi::ErrorCode::kOk;
    case CGX_INVALID_ARGUMENT:
      return ffi::ErrorCode::kInvalidArgument;
    case CGX_UNSUPPORTED:
      return ffi::ErrorCode::kUnimplemented;
    case CGX_NOT_FOUND:
      return ffi::ErrorCode::kNotFound;
    case CGX_MISMATCH:
      return ffi::ErrorCode::kFailedPrecondition;
    case CGX_TIMEOUT:
      return ffi::ErrorCode::kDeadlineExceeded;
    case CGX_PEER_FAILED:
      return ffi::ErrorCode::kUnavailable;
    case CGX_CLOSED:
      return ffi::ErrorCode::kAborted;
    case CGX_SYSTEM:
    case CGX_INTERNAL:
      break;
  }
  return ffi::ErrorCode::kInternal;
}

cgx_dtype_t ToDtype(ffi::DataType type) {
  switch (type) {
    case ffi::F32:
      return CGX_FLOAT32;
    case ffi::F16:
      return CGX_FLOAT16;
    case ffi::BF16:
      return CGX_BFLOAT16;
    default:
      throw StatusError(CGX_UNSUPPORTED, "only float32, float16 and bfloat16 can be compressed");
  }
}

// Completes the promise on a thread of its own; see completion_pool.h.
void Complete(std::unique_ptr<Call> call, cgx_status_t status, const std::string& message) {
  std::shared_ptr<Call> shared = std::move(call);
  CompletionPool::get().run([shared, status, message] {
    if (status == CGX_OK) {
      shared->promise.SetAvailable();
    } else {
      shared->promise.SetError(ffi::Error(ToErrorCode(status), shared->where + ": " + message));
    }
  });
}

void Finish(void* context, cgx_status_t status, const char* message) {
  Complete(std::unique_ptr<Call>(static_cast<Call*>(context)), status, message);
}

// Each example of a vmap is to be reduced as if it were alone, so "auto" must go by the size of
// one.
cgx_status_t PickAlgorithm(cgx_collective_t& collective) {
  if (collective.algorithm != CGX_AUTO || collective.num_segments == 1) return CGX_OK;
  cgx_collective_t one = collective;
  one.num_segments = 1;
  auto plan = make<cgx_plan_t>();
  cgx_status_t status = cgx_plan(&one, &plan);
  collective.algorithm = plan.algorithm;
  return status;
}

void Start(std::unique_ptr<Call> call, int32_t comm) {
  cgx_collective_t collective = call->collective;
  collective.comm = comm;
  collective.segments = call->segments.data();
  collective.num_segments = static_cast<int64_t>(call->segments.size());
  collective.name = call->key.c_str();
  // Finish may run, and free the call, before cgx_start returns.
  Call* context = call.release();
  cgx_status_t status = PickAlgorithm(collective);
  if (status == CGX_OK) status = cgx_start(&collective, &Finish, context, nullptr);
  if (status != CGX_OK) Complete(std::unique_ptr<Call>(context), status, cgx_last_error());
}

// Fills everything but the communicator and the key.
void Describe(const ffi::AnyBuffer& x, ffi::AnyBuffer& y, const ffi::Buffer<ffi::U32>& seed,
              const Site& site, Call& call) {
  call.collective = site.collective();
  call.collective.dtype = ToDtype(x.element_type());
  uint64_t low = seed.typed_data()[0], high = seed.typed_data()[1];
  call.collective.seed = static_cast<int64_t>(low | high << 32);
  call.collective.input = x.untyped_data();
  call.collective.output = y.untyped_data();
  int64_t numel = static_cast<int64_t>(x.element_count()) / site.batch();
  for (int64_t example = 0; example < site.batch(); ++example) {
    call.segments.push_back({example * numel, numel, site.bucket_size(), site.bits(), 0});
  }
}

void StartAmongDevices(std::unique_ptr<Call> call, int64_t run, int64_t partition,
                       const Site::Place& place, Site& site) {
  call->key = std::to_string(site.serial()) + "@" + std::to_string(run);
  call->collective.occurrence = site.NextOccurrence(run, partition);
  call->collective.timeout_s = local_timeout_s;
  int32_t comm = -1;
  try {
    comm = LocalCommunicator(place.members, place.rank, run, local_timeout_s);
  } catch (const StatusError& error) {
    Complete(std::move(call), error.status, error.what());
    return;
  }
  Start(std::move(call), comm);
}

void StartAmongProcesses(std::unique_ptr<Call> call, const Site::Place& place, const Site& site) {
  call->key = site.name();
  call->collective.occurrence =
      -1;  // a site's executions follow each other, in every process alike
  std::vector<int32_t> processes;
  for (int64_t member : place.members) {
    processes.push_back(static_cast<int32_t>(site.process(member)));
  }
  auto start = [waiting = std::make_shared<std::unique_ptr<Call>>(std::move(call))](
                   int32_t comm, cgx_status_t status, const std::string& message) {
    if (status == CGX_OK) {
      Start(std::move(*waiting), comm);
    } else {
      Complete(std::move(*waiting), status, message);
    }
  };
  WithProcessCommunicator(processes, std::move(start));
}

ffi::Error ToError(const StatusError& error) {
  return ffi::Error(ToErrorCode(error.status), std::string("psum_q: ") + error.what());
}

ffi::ErrorOr<std::unique_ptr<Site>> Instantiate(ffi::Dictionary attributes) {
  try {
    return std::make_unique<Site>(attributes);
  } catch (const StatusError& error) {
    return ffi::Unexpected(ToError(error));
  }
}

ffi::Future Execute(ffi::AnyBuffer x, ffi::Buffer<ffi::U32> seed,
                    ffi::Buffer<ffi::U32> partition_id, ffi::Result<ffi::AnyBuffer> y,
                    ffi::Dictionary, ffi::RunId run, Site* site) {
  auto call = std::make_unique<Call>();
  ffi::Future future(call->promise);
  try {
    int64_t partition = *partition_id.typed_data();
    Site::Place place = site->Find(partition);
    call->where = "psum_q '" + site->name() + "' on rank " + std::to_string(place.rank) + " of " +
                  std::to_string(place.members.size());
    Describe(x, *y, seed, *site, *call);
    if (site->across_processes()) {
      StartAmongProcesses(std::move(call), place, *site);
    } else {
      StartAmongDevices(std::move(call), run.run_id, partition, place, *site);
    }
  } catch (const StatusError& error) {  // from Find and Describe: the call is still ours
    call->promise.SetError(ToError(error));
  }
  return future;
}

}  // namespace

void SetLocalTimeout(double seconds) { local_timeout_s = seconds; }

XLA_FFI_DEFINE_HANDLER_SYMBOL(PsumQInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(PsumQExecute, Execute,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attrs()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::State<Site>>());

}  // namespace cgx::xla
