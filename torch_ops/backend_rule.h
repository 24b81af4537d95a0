// Decides which allreduces of the backend "cgx" are compressed.
//
//   Compression   a cgx_ops.Config or, for bits="auto", several that depend on the message size
//   Scope         `with compressed():` or `with uncompressed():` on the calling thread
//   Context       the scope, and whether gradients are being completed. A future's callbacks run in
//                 the context of the call that started it, on any thread. Otherwise the decision
//                 would depend on timing, and ranks would differ.
//   decide()      the rule; the PyTorch guide explains it ("What is compressed")
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cgx/cgx.h"

namespace cgx::torch_ops {

struct Compression {
  // Messages of at least `numel` elements of `element_bytes` bytes use this compression instead.
  // CUDA tensors (element_bytes 0) never do.
  struct Larger {
    int64_t numel;
    int64_t element_bytes;
    std::shared_ptr<const Compression> compression;
  };

  // `config` is a text for cgx_config_parse. Throws the core's error. `larger` is in ascending
  // order of numel.
  Compression(const char* config, int64_t seed, std::vector<Larger> larger = {});
  cgx_config_t config;
  int64_t seed;
  cgx_seed_use_t seed_use = CGX_SEED_UNUSED;
  std::string words;  // for people: "4 bits", "topk"
  std::vector<Larger> larger;
};

struct Scope {
  enum class Kind { kNone, kCompressed, kUncompressed };
  Kind kind = Kind::kNone;
  std::shared_ptr<const Compression> compression;  // for kCompressed: null means the group's
};

// Sets the calling thread's scope and returns the previous one.
Scope exchange_scope(Scope scope);

// Whether the caller runs in the part of backward that completes gradients: while autograd
// accumulates a leaf's gradient (DDP's reducer and parameter hooks run there), or in the callbacks
// at the end of backward (DDP reduces there with static_graph). Also true in a callback of a
// collective that started there.
bool completing_gradients();

struct Context {
  static Context current();
  Scope scope;
  bool completing_gradients = false;
};

// Sets the calling thread's context until it is destroyed.
class ContextGuard {
 public:
  explicit ContextGuard(const Context& context);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  const Context outer_;
};

// The allreduces that a group compresses outside of scopes.
enum class Automatic { kGradients, kEverything, kNothing };

struct Decision {
  std::shared_ptr<const Compression> compression;  // null: uncompressed
  const char* reason;
  bool surprising = false;  // uncompressed, though the group has bits and the caller did not ask
                            // for it
};

// Decides on an allreduce of `numel` floating-point values of `element_bytes` bytes each (0: CUDA).
// `group` is the group's own compression.
Decision decide(const std::shared_ptr<const Compression>& group, Automatic automatic, cgx_op_t op,
                int64_t numel, int64_t element_bytes);
// Decides on an exchange of `numel` values between ranks, which is compressed inside compressed()
// only. The sizes of an all_to_all differ between ranks, so its auto_bits are those of the largest
// messages.
inline constexpr int64_t kLargest = INT64_MAX;
Decision decide_exchange(const std::shared_ptr<const Compression>& group, int64_t numel,
                         int64_t element_bytes);

// Logs a decision on a call. Wanted if debug_wanted().
void log_decision(const std::string& call, const Decision& decision);

}  // namespace cgx::torch_ops
