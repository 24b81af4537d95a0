// The table of collectives, for the core and the bindings. A new collective is a row here, a value
// of cgx_verb_t, an algorithm that serves it, and the public functions.
#ifndef CGX_VERB_H_
#define CGX_VERB_H_

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

#include "cgx/cgx.h"

namespace cgx {

// Whether a collective can have residuals.
enum class Residuals { kNone, kOnCpu, kAnywhere };

struct Verb {
  cgx_verb_t id;
  const char* name;
  // Whether a buffer holds a block of block_numel elements for each rank; else it holds one block.
  bool blocks_in = false, blocks_out = false;
  // Whether values of several ranks are summed; else `op` is ignored.
  bool reduces = false;
  // The stages that encode values. Scatter: each rank sends every owner its part. Gather: each
  // owner sends its part of the result to all; without it the owner alone has it. A rank owns its
  // block or, where both buffers hold one block, a shard of that.
  bool scatters = false, gathers = false;
  bool lists = false;  // of pointers, one for each segment, may stand for the buffers
  Residuals residuals = Residuals::kNone;
  cgx_algorithm_t algorithm = CGX_AUTO;  // the only one that serves it; CGX_AUTO: the config's

  constexpr bool shards() const { return !blocks_in && !blocks_out; }  // what a rank owns
};

// In the order of cgx_verb_t.
inline constexpr Verb kVerbs[] = {
    {.id = CGX_ALLREDUCE,
     .name = "allreduce",
     .reduces = true,
     .scatters = true,
     .gathers = true,
     .lists = true,
     .residuals = Residuals::kAnywhere},
    {.id = CGX_REDUCE_SCATTER,
     .name = "reduce_scatter",
     .blocks_in = true,
     .reduces = true,
     .scatters = true,
     .residuals = Residuals::kOnCpu,
     .algorithm = CGX_SRA},
    {.id = CGX_ALL_GATHER,
     .name = "all_gather",
     .blocks_out = true,
     .gathers = true,
     .algorithm = CGX_SRA},
};

// Throws StatusError for a number that has no row.
constexpr const Verb& verb_of(int32_t id) {
  if (id < 0 || id >= std::ssize(kVerbs))
    throw StatusError(CGX_INVALID_ARGUMENT, "verb is " + std::to_string(id) + "; no row has it");
  return kVerbs[id];
}

constexpr bool in_order_of_ids() {
  for (size_t i = 0; i < std::size(kVerbs); ++i)
    if (kVerbs[i].id != static_cast<cgx_verb_t>(i)) return false;
  return true;
}
static_assert(in_order_of_ids());

}  // namespace cgx
#endif  // CGX_VERB_H_
