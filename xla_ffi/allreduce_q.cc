// How one execution of allreduce_q goes:
//
//   1. Execute, on a thread of XLA: finds the communicator by its name, starts one collective of
//      all leaves and returns a future. It never waits: other devices may need the thread.
//   2. The end, on a thread of the core: hands the promise to the pool, whose thread completes it.
//
// The order of calls is XLA's affair: each call takes the token that the one before it gives, and
// so starts after that one's end.
#include "allreduce_q.h"

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "call.h"
#include "cgx/cgx.h"
#include "cgx/completion_pool.h"
#include "core.h"
#include "launches.h"

namespace cgx::xla {

// The attributes of the custom call.
struct AllreduceSettings {
  std::string_view comm, name;
  int64_t op, algorithm, rounding, gather_bits, intra_bits, skip_incomplete_buckets, minimal_size;
  int64_t bits, bucket_size;
};

}  // namespace cgx::xla

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::cgx::xla::AllreduceSettings, StructMember<std::string_view>("comm"),
    StructMember<std::string_view>("name"), StructMember<int64_t>("op"),
    StructMember<int64_t>("algorithm"), StructMember<int64_t>("rounding"),
    StructMember<int64_t>("gather_bits"), StructMember<int64_t>("intra_bits"),
    StructMember<int64_t>("skip_incomplete_buckets"), StructMember<int64_t>("minimal_size"),
    StructMember<int64_t>("bits"), StructMember<int64_t>("bucket_size"));

namespace cgx::xla {
namespace {

// Of leaves (batch, n), and their seeds (batch, 2).
std::shared_ptr<Message> MakeMessage(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                     const AllreduceSettings& settings) {
  auto collective = make<cgx_collective_t>();
  collective.verb = CGX_ALLREDUCE;
  collective.op = static_cast<int32_t>(settings.op);
  collective.algorithm = static_cast<int32_t>(settings.algorithm);
  collective.rounding = static_cast<int32_t>(settings.rounding);
  collective.gather_bits = static_cast<int32_t>(settings.gather_bits);
  collective.intra_bits = static_cast<int32_t>(settings.intra_bits);
  collective.skip_incomplete_buckets = static_cast<int32_t>(settings.skip_incomplete_buckets);
  collective.minimal_size = settings.minimal_size;
  collective.dtype = ToDtype(args.get<ffi::AnyBuffer>(0)->element_type());
  collective.occurrence = -1;  // the order of calls is that of the program
  auto message = std::make_shared<Message>(collective, std::string(settings.name));
  for (size_t i = 0; i < rets.size(); ++i) {
    const ffi::AnyBuffer values = *args.get<ffi::AnyBuffer>(i);
    const ffi::AnyBuffer result = **rets.get<ffi::AnyBuffer>(i);
    const auto seeds = *args.get<ffi::Buffer<ffi::U32>>(rets.size() + i);
    const int64_t batch = values.dimensions()[0], numel = values.dimensions()[1];
    message->Add({static_cast<const std::byte*>(values.untyped_data()),
                  static_cast<std::byte*>(result.untyped_data()), /*error=*/nullptr,
                  static_cast<int32_t>(settings.bits), batch, numel},
                 settings.bucket_size);
    for (int64_t row = 0; row < batch; ++row) {
      const uint64_t low = seeds.typed_data()[2 * row], high = seeds.typed_data()[2 * row + 1];
      message->seeds.push_back(static_cast<int64_t>(low | high << 32));
    }
  }
  return message;
}

int32_t FindCommunicator(const std::string& name) {
  int32_t comm = -1;
  const cgx_status_t status = cgx_comm_find(name.c_str(), &comm);
  if (status != CGX_OK) {
    throw StatusError(status, std::string(cgx_last_error()) +
                                  ". It was closed after this program had been traced: trace the "
                                  "program again, with another communicator");
  }
  return comm;
}

// One execution, until its promise is completed.
struct Execution {
  ffi::Promise promise;
  std::string where;  // for error messages
  std::unique_ptr<LaunchedCall> launched;
};

void Complete(std::shared_ptr<Execution> execution, cgx_status_t status, std::string text) {
  CompletionPool::get().run([execution = std::move(execution), status, text = std::move(text)] {
    execution->launched.reset();  // the program goes on inside of what follows
    if (status == CGX_OK) {
      execution->promise.SetAvailable();
    } else {
      execution->promise.SetError(ffi::Error(ToErrorCode(status), execution->where + text));
    }
  });
}

ffi::Future Execute(AllreduceSettings settings, ffi::Token, ffi::RemainingArgs args,
                    ffi::Result<ffi::Token>, ffi::RemainingRets rets, ffi::RunId run) {
  const std::string comm_name(settings.comm), name(settings.name);
  auto execution = std::make_shared<Execution>();
  execution->where = "allreduce_q '" + name + "' on '" + comm_name + "': ";
  ffi::Future future(execution->promise);
  try {
    const int32_t comm = FindCommunicator(comm_name);
    auto message = MakeMessage(args, rets, settings);
    // Only launches of other threads can overlap this one, on whatever device they are.
    execution->launched = std::make_unique<LaunchedCall>(
        /*device=*/-1, run.run_id, comm_name + "/" + name, /*named=*/true);
    if (execution->launched->alone()) {
      Start(std::move(message), comm, [execution](cgx_status_t status, const std::string& text) {
        Complete(execution, status, text);
      });
    } else {
      cgx_refuse(&message->On(comm), CGX_INVALID_ARGUMENT, kOverlap);
      Complete(execution, CGX_INVALID_ARGUMENT, kOverlap);
    }
  } catch (const StatusError& error) {
    Complete(execution, error.status, error.what());
  }
  return future;
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AllreduceQ, Execute,
                              ffi::Ffi::Bind()
                                  .Attrs<AllreduceSettings>()
                                  .Arg<ffi::Token>()
                                  .RemainingArgs()
                                  .Ret<ffi::Token>()
                                  .RemainingRets()
                                  .Ctx<ffi::RunId>());

}  // namespace cgx::xla
