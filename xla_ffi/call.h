// One execution of a collective on one device: its buffers, the message for the core and, on CPU,
// the call from Execute to the completed promise.
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
  const cgx_config_t* config;  // owned by the signature
  int64_t batch;               // number of segments: examples of a vmap
  int64_t numel;               // of a segment
  int64_t elements() const { return batch * numel; }
};

// The leaves of a custom call. Its operands are the leaves, the seeds of all segments in one buffer
// and, with feedback, the residuals. Its results are those of the leaves, then the new residuals,
// each in the buffer of the old one.
struct Operands {
  // Throws StatusError.
  Operands(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
           const Signature& signature);

  int32_t dtype;
  std::vector<Leaf> leaves;
};

// Returns the seeds, (segments, 2): see ReadSeeds.
inline U32Buffer SeedsOf(const ffi::RemainingArgs& args, const Signature& signature) {
  return GetBuffer<U32Buffer>(args, signature.batches.size());
}

// The end of one execution of a custom call: a promise that is completed once.
class Completion {
 public:
  explicit Completion(std::string where) : where_(std::move(where)) {}

  ffi::Future future() { return ffi::Future(promise_); }
  // Counts the execution as a call in flight (see LaunchedCall), until just before the promise is
  // completed. Returns whether it is alone so far.
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

// Returns the future of an execution that never started.
ffi::Future Failed(const std::exception& error);

// Copies the needed parts of XLA's call frame, which is gone when the handler returns. The buffers
// live until the promise is completed.
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
// every rank. Its noise_rank is the rank in its group, whatever the communicator. Groups whose
// noise must differ have different seeds (cgx_ops/jax/_src/collectives/keys.py).
using Message = CallBuilder;

// Adds a leaf's segments, in the buffers (or blocks) of the message.
void AddSegments(const Leaf& leaf, Message* message);
// Adds a leaf's segments with their own buffers and, with `feedback`, residuals.
void AddLeaf(const Leaf& leaf, bool feedback, Message* message);

// Returns the message of a device that is a rank, without seeds. Buffers are not copied.
Message AsRank(const Operands& operands, const Signature& signature, std::string key);

// Starts a message, which need not outlive this call. `done` is called once, on a thread that must
// not block.
using Done = std::function<void(cgx_status_t status, const std::string& text)>;
void Start(Message& message, int32_t comm, Done done);

// Enqueues a message on a stream. Its buffers and the seeds, by segment, are in GPU memory. Throws
// StatusError.
void EnqueueOn(CUstream_st* stream, Message& message, const U32Buffer& seeds, int32_t comm);

}  // namespace cgx::xla
