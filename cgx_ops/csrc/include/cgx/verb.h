// The table of collectives, for the core and the bindings.
//
// A new collective needs a row here, a value of cgx_verb_t, an algorithm that supports it, and
// public functions in the bindings.
#ifndef CGX_VERB_H_
#define CGX_VERB_H_

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

#include "cgx/cgx.h"

namespace cgx {

// Which algorithms of a config a collective supports.
enum class Algorithms {
  kAll,
  kLevels,  // hierarchical. All others are sra, which sends the blocks directly.
  kOne,     // all are sra
};

struct Verb {
  cgx_verb_t id;
  const char* name;
  // Whether the buffer holds one block of block_numel elements per rank; otherwise it holds one
  // block.
  bool blocks_in = false, blocks_out = false;
  // Whether values of several ranks are reduced. If not, `op` is ignored.
  bool reduces = false;
  // The stages, which encode values. Scatter: each rank sends every owner that owner's part.
  // Gather: each owner sends its result to all ranks; without this stage only the owner has it. A
  // rank owns its block or, if both buffers hold a single block, a shard of that block.
  bool scatters = false, gathers = false;
  bool lists = false;      // whether lists of pointers, one per segment, may replace the buffers
  bool residuals = false;  // whether it supports residuals (error feedback)
  Algorithms algorithms = Algorithms::kAll;

  constexpr bool shards() const { return !blocks_in && !blocks_out; }  // whether ranks own shards
  // Whether each rank sends another block to each rank.
  constexpr bool exchanges() const { return blocks_in && blocks_out; }
};

// In the order of cgx_verb_t.
inline constexpr Verb kVerbs[] = {
    {.id = CGX_ALLREDUCE,
     .name = "allreduce",
     .reduces = true,
     .scatters = true,
     .gathers = true,
     .lists = true,
     .residuals = true},
    {.id = CGX_REDUCE_SCATTER,
     .name = "reduce_scatter",
     .blocks_in = true,
     .reduces = true,
     .scatters = true,
     .residuals = true,
     .algorithms = Algorithms::kLevels},
    {.id = CGX_ALL_GATHER,
     .name = "all_gather",
     .blocks_out = true,
     .gathers = true,
     .algorithms = Algorithms::kLevels},
    {.id = CGX_ALL_TO_ALL,
     .name = "all_to_all",
     .blocks_in = true,
     .blocks_out = true,
     .scatters = true,
     .algorithms = Algorithms::kOne},
};

// Returns the row of a cgx_verb_t. Throws StatusError for any other number.
constexpr const Verb& verb_of(int32_t id) {
  if (id < 0 || id >= std::ssize(kVerbs))
    throw StatusError(CGX_INVALID_ARGUMENT,
                      "verb is " + std::to_string(id) + "; accepted: a cgx_verb_t");
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
