#include "call.h"

#include <algorithm>
#include <utility>

#include "cgx/completion_pool.h"
#include "core.h"

namespace cgx::xla {
namespace {

void Finish(void* context, cgx_status_t status, const char* text) {
  const std::unique_ptr<Done> done(static_cast<Done*>(context));
  (*done)(status, text);
}

}  // namespace

// ---- Operands -----------------------------------------------------------------------------------

Operands::Operands(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                   const Signature& signature) {
  const size_t count = signature.batches.size();
  for (size_t i = 0; i < count; ++i) {
    const int64_t batch = signature.batches[i];
    const auto values = GetBuffer<ffi::AnyBuffer>(args, i);
    auto result = GetBuffer<ffi::AnyBuffer>(rets, i);
    dtype = ToDtype(values.element_type());
    // The size of one block: if only one side has a block for each rank, the other side has one.
    auto elements = static_cast<int64_t>(std::min(values.element_count(), result->element_count()));
    if (signature.verb.exchanges()) elements /= std::max<int64_t>(values.dimensions()[0], 1);
    void* residual = nullptr;
    if (signature.feedback) residual = GetBuffer<ffi::AnyBuffer>(rets, count + i)->untyped_data();
    leaves.push_back({static_cast<const std::byte*>(values.untyped_data()),
                      static_cast<std::byte*>(result->untyped_data()),
                      static_cast<std::byte*>(residual), &signature.configs[i], batch,
                      elements / std::max<int64_t>(batch, 1)});
  }
}

// ---- Completion, Call ---------------------------------------------------------------------------

void Completion::Complete(cgx_status_t status, const std::string& message) {
  const bool alone = !launched_ || launched_->Leave();
  if (status != CGX_OK) {
    promise_.SetError(ffi::Error(ToErrorCode(status), where_ + ": " + message));
  } else if (!alone) {
    promise_.SetError(ffi::Error(ToErrorCode(CGX_INVALID_ARGUMENT), where_ + ": " + kOverlap));
  } else {
    promise_.SetAvailable();
  }
}

void CompleteSoon(const std::shared_ptr<Completion>& completion, cgx_status_t status,
                  const std::string& text) {
  try {
    CompletionPool::get().run([completion, status, text] { completion->Complete(status, text); });
  } catch (const std::exception& error) {  // out of memory for the task
    completion->Complete(StatusOf(error), error.what());
  }
}

ffi::Future Failed(const std::exception& error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ToError(error));
  return future;
}

Call::Call(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, const Site& site,
           const Site::Place& place)
    : Completion(site.Describe(place)),
      operands_(args, rets, site.signature()),
      seeds_(ReadSeeds(SeedsOf(args, site.signature()))) {}

// ---- Message ------------------------------------------------------------------------------------

void AddSegments(const Leaf& leaf, Message* message) {
  for (int64_t row = 0; row < leaf.batch; ++row)
    message->add(leaf.numel, leaf.config, static_cast<int32_t>(row));
}

void AddLeaf(const Leaf& leaf, bool feedback, Message* message) {
  AddSegments(leaf, message);
  for (int64_t row = 0; row < leaf.batch; ++row) {
    const int64_t at = row * leaf.numel * SizeOf(message->fields.dtype);
    message->inputs.push_back(leaf.values + at);
    message->outputs.push_back(leaf.result + at);
    // Also for an empty leaf without a buffer: the list has an entry per segment.
    if (feedback) message->residuals.push_back(leaf.residual ? leaf.residual + at : nullptr);
  }
}

Message AsRank(const Operands& operands, const Signature& signature, std::string key) {
  Message message = MakeCall(signature.verb, signature.op, signature.configs, std::move(key));
  message.fields.dtype = operands.dtype;
  if (signature.verb.lists) {
    for (const Leaf& leaf : operands.leaves) AddLeaf(leaf, signature.feedback, &message);
    return message;
  }
  const Leaf& leaf = operands.leaves[0];
  AddSegments(leaf, &message);
  message.fields.input = leaf.values;
  message.fields.output = leaf.result;
  message.fields.block_numel = leaf.elements();
  return message;
}

void Start(Message& message, int32_t comm, Done done) {
  CompletionPool::get();  // create the pool now, since completion must not fail
  auto* context = new Done(std::move(done));
  // Finish may run, and free it, before cgx_start returns.
  cgx_status_t status;
  std::string text;
  try {
    message.fields.comm = comm;
    status = cgx_start(&message.get(), &Finish, context, nullptr);
    if (status != CGX_OK) text = cgx_last_error();
  } catch (const std::exception& error) {
    status = StatusOf(error);
    text = error.what();
  }
  if (status != CGX_OK) Finish(context, status, text.c_str());
}

void EnqueueOn(CUstream_st* stream, Message& message, const U32Buffer& seeds, int32_t comm) {
  message.fields.comm = comm;
  message.fields.device = CGX_CUDA;
  message.fields.stream = stream;
  // Rows (low half, high half) are the device's little-endian int64.
  message.fields.device_seeds = static_cast<const int64_t*>(seeds.untyped_data());
  check(cgx_enqueue(&message.get()));
}

}  // namespace cgx::xla
