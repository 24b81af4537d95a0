// One execution of allreduce_q, on a CPU device:
//
//   1. Execute, on a thread of XLA: finds the communicator by its name, starts one collective of
//      all leaves and returns a future. It never blocks: other devices may need the thread.
//   2. The end, on a thread of the core: hands the promise to the pool, whose thread completes it.
//
// On a GPU, Enqueue puts the collective on the stream and returns (see cuda.cc).
//
// XLA orders the calls: each call takes the token of the previous one, and so starts after its end.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "call.h"
#include "cgx/cgx.h"
#include "core.h"
#include "handlers.h"
#include "launches.h"

namespace cgx::xla {
namespace {

std::string Text(const ffi::Dictionary& attributes, std::string_view name) {
  return std::string(GetAttribute<std::string_view>(attributes, name));
}

// For error messages.
std::string Describe(const ffi::Dictionary& attributes) {
  return "allreduce_q '" + Text(attributes, "name") + "' on '" + Text(attributes, "comm") + "'";
}

// Returns the message without its seeds.
Message MakeMessage(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                    const ffi::Dictionary& attributes, const Signature& signature) {
  return AsRank(Operands(args, rets, signature), signature, Text(attributes, "name"));
}

int32_t FindCommunicator(const ffi::Dictionary& attributes) {
  int32_t comm = -1;
  const cgx_status_t status = cgx_comm_find(Text(attributes, "comm").c_str(), &comm);
  if (status != CGX_OK) {
    throw StatusError(status, std::string(cgx_last_error()) +
                                  ". It was closed after this program was traced: trace the "
                                  "program again, with another communicator");
  }
  return comm;
}

void StartCall(const std::shared_ptr<Completion>& completion, const ffi::Dictionary& attributes,
               const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, int64_t run) {
  const int32_t comm = FindCommunicator(attributes);
  const Signature signature(attributes);
  Message message = MakeMessage(args, rets, attributes, signature);
  message.seeds = ReadSeeds(SeedsOf(args, signature));
  // Only launches of other threads can overlap this one, on any device.
  if (completion->Launch(/*device=*/-1, run,
                         Text(attributes, "comm") + "/" + Text(attributes, "name"),
                         /*named=*/true)) {
    return Start(message, comm, [completion](cgx_status_t status, const std::string& text) {
      CompleteSoon(completion, status, text);
    });
  }
  message.fields.comm = comm;
  cgx_refuse(&message.get(), CGX_INVALID_ARGUMENT, kOverlap);
  CompleteSoon(completion, CGX_INVALID_ARGUMENT, kOverlap);
}

ffi::Future Execute(ffi::Dictionary attributes, ffi::Token, ffi::RemainingArgs args,
                    ffi::Result<ffi::Token>, ffi::RemainingRets rets, ffi::RunId run) {
  try {
    const auto completion = std::make_shared<Completion>(Describe(attributes));
    ffi::Future future = completion->future();
    try {
      StartCall(completion, attributes, args, rets, run.run_id);
    } catch (const std::exception& error) {  // nothing was started
      CompleteSoon(completion, StatusOf(error), error.what());
    }
    return future;
  } catch (const std::exception& error) {
    return Failed(error);
  }
}

ffi::Error Enqueue(ffi::Dictionary attributes, ffi::Token, ffi::RemainingArgs args,
                   ffi::Result<ffi::Token>, ffi::RemainingRets rets, CUstream_st* stream) {
  std::string where = "allreduce_q";
  try {
    where = Describe(attributes);
    const int32_t comm = FindCommunicator(attributes);
    const Signature signature(attributes);
    Message message = MakeMessage(args, rets, attributes, signature);
    EnqueueOn(stream, message, SeedsOf(args, signature), comm);
    return ffi::Error::Success();
  } catch (const std::exception& error) {
    return ToError(error, where + ": ");
  }
}

// The part of the binding that both platforms share.
auto BindCall() {
  return ffi::Ffi::Bind()
      .Attrs()
      .Arg<ffi::Token>()
      .RemainingArgs()
      .Ret<ffi::Token>()
      .RemainingRets();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AllreduceQ, Execute, BindCall().Ctx<ffi::RunId>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaAllreduceQ, Enqueue,
                              BindCall().Ctx<ffi::PlatformStream<CUstream_st*>>());

}  // namespace cgx::xla
