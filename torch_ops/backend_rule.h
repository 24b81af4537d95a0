// Which allreduces of the backend "cgx" are compressed.
//
//   Compression   how values travel: a cgx_ops.Config as the core wants it, or, by the size of a
//                 message, one of several (bits="auto")
//   Scope         what `with compressed():` and `with uncompressed():` say, on the calling thread
//   Context       that, and whether gradients are being completed. The callbacks of a future have
//                 the context of the call that it is of, whichever thread runs them: else ranks
//                 would decide by who was faster
//   decide()      the rule; docs/guides/torch.md, "What is compressed", has it in words
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cgx/cgx.h"

namespace cgx::torch_ops {

struct Compression {
  // From so many elements on, messages of elements of so many bytes travel by another one. Of
  // those on devices (0 bytes) none does.
  struct Larger {
    int64_t numel;
    int64_t element_bytes;
    std::shared_ptr<const Compression> compression;
  };

  // `config` is a text of cgx_config_parse. Throws what the core has against it. `larger`: by
  // rising numel.
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
  std::shared_ptr<const Compression> compression;  // kCompressed: null means the group's
};

// Makes `scope` the calling thread's and returns what it was.
Scope exchange_scope(Scope scope);

// Whether the caller is inside the part of backward that completes gradients: while autograd
// accumulates a leaf's gradient (DDP's reducer and hooks on parameters run there), or in the
// callbacks at the end of backward (where DDP reduces with static_graph). Or in a callback of a
// collective that was.
bool completing_gradients();

struct Context {
  static Context current();
  Scope scope;
  bool completing_gradients = false;
};

// Makes `context` the calling thread's, until it is destroyed.
class ContextGuard {
 public:
  explicit ContextGuard(const Context& context);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  const Context outer_;
};

// What a group compresses that nobody asked for by a scope.
enum class Automatic { kGradients, kEverything, kNothing };

struct Decision {
  std::shared_ptr<const Compression> compression;  // null: exact
  const char* reason;
  bool surprising = false;  // exact though bits are set, and nobody asked for that
};

// On an allreduce of `numel` floating values of `element_bytes` each (0: on a
// device) with `op`. `group` is the communication group's own setting.
Decision decide(const std::shared_ptr<const Compression>& group, Automatic automatic, cgx_op_t op,
                int64_t numel, int64_t element_bytes);

}  // namespace cgx::torch_ops
