// One execution of a collective on one device: its buffers, the message that the core gets of them
// and, on CPU, the call from Execute to the completed promise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cgx/cgx.h"
#include "core.h"
#include "launches.h"
#include "site.h"
#include "xla/ffi/api/ffi.h"

struct CUstream_st;  // what a cudaStream_t points to

namespace cgx::xla {

struct Leaf {
  const std::byte* values;
  std::byte* result;
  std::byte* residual;         // read and written in place; null without feedback
  const cgx_config_t* config;  // the signature's
  int64_t batch;               // segments: the examples of a vmap
  int64_t numel;               // of a segment
  int64_t elements() const { return batch * numel; }
};

// The leaves of a custom call. Its operands are these, the seeds of all their segments in one and,
// with feedback, their residuals; its results are those of the leaves, then the new residuals, each
// in the buffer of the old one.
struct Operands {
  // Throws StatusError.
  Operands(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
           const Signature& signature);

  int32_t dtype;
  std::vector<Leaf> leaves;
};

// (segments, 2): see ReadSeeds.
inline U32Buffer SeedsOf(const ffi::RemainingArgs& args, const Signature& signature) {
  return GetBuffer<U32Buffer>(args, signature.batches.size());
}

// The end of one execution of a custom call: a promise that it completes once.
class Completion {
 public:
  explicit Completion(std::string where) : where_(std::move(where)) {}

  ffi::Future future() { return ffi::Future(promise_); }
  // Counts the execution among the calls in flight (see LaunchedCall), until just before the
  // promise is completed. Returns whether it is alone so far.
  bool Launch(int32_t device, int64_t run, std::string name, bool named) {
    return launched_.emplace(device, run, std::move(name), named).alone();
  }
  // Resumes XLA's program on this thread, which may block: see completion_pool.h.
  void Complete(cgx_status_t status, const std::string& message);

 private:
  ffi::Promise promise_;
  std::optional<LaunchedCall> launched_;
  const std::string where_;  // for error messages
};

// Completes on a thread of the pool.
void CompleteSoon(const std::shared_ptr<Completion>& completion, cgx_status_t status,
                  const std::string& text);

// Of an execution that never began.
ffi::Future Failed(const std::exception& error);

// Copies what it needs of XLA's call frame, which dies when the handler returns; the buffers live
// until the promise is completed.
class Call : public Completion {
 public:
  // Throws StatusError.
  Call(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, const Site& site,
       const Site::Place& place);

  int32_t dtype() const { return operands_.dtype; }
  const std::vector<Leaf>& leaves() const { return operands_.leaves; }
  const std::vector<int64_t>& seeds() const { return seeds_; }  // by segment
  const Operands& operands() const { return operands_; }

 private:
  const Operands operands_;
  const std::vector<int64_t> seeds_;
};

// A rank's part of a collective. Executions of one name follow each other in the same order on
// every rank. Its noise_rank is the rank's number in its group, whatever communicator serves that:
// groups whose noise must differ have different seeds (cgx_ops/jax/_src/collectives/keys.py).
using Message = CallBuilder;

// Adds a leaf's segments, in the buffers (or blocks) that the message has.
void AddSegments(const Leaf& leaf, Message* message);
// Adds a leaf's segments, wherever its buffers are; with `feedback` it has a residual.
void AddLeaf(const Leaf& leaf, bool feedback, Message* message);

// The message of a device that is a rank of its own: buffers are used where they are. It has no
// seeds yet.
Message AsRank(const Operands& operands, const Signature& signature, std::string key);

// Starts a message, which need not outlive this; `done` is called once, on a thread that must not
// be blocked.
using Done = std::function<void(cgx_status_t status, const std::string& text)>;
void Start(Message& message, int32_t comm, Done done);

// Puts a message on a stream; its buffers and the seeds, by segment, are in the GPU's memory.
// Throws StatusError.
void EnqueueOn(CUstream_st* stream, Message& message, const U32Buffer& seeds, int32_t comm);

}  // namespace cgx::xla
