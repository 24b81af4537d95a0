// An algorithm decides which rank sends what, and when. It is a state machine that never blocks:
// the engine delivers messages, calls step() repeatedly, and may run any number of others
// concurrently.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "algorithm/layout.h"
#include "plan.h"
#include "transport/transport.h"

namespace cgx {

// The operations that an algorithm may use for its own collective.
class Port {
 public:
  virtual ~Port() = default;
  virtual BufferRef allocate(size_t bytes) = 0;
  // `part` (0 or 1) separates two ordered streams to one destination.
  virtual void send(int destination, int part, const BufferRef& buffer, size_t bytes) = 0;
  virtual int unreleased() const = 0;  // messages that peers have not read yet
};

enum class Step {
  kWorked,   // call again
  kIdle,     // nothing to do until a message arrives
  kBlocked,  // too much is in flight: call again when peers have read some messages
};

class Algorithm {
 public:
  virtual ~Algorithm() = default;
  // Returns this rank's payload in the header that announces the collective. Called once, before
  // all other functions. The peers' payloads come with their headers.
  virtual Bytes eager() { return {}; }
  // Returns how the ranks' payloads contradict each other; "" if they do not. Called after all of
  // them were delivered. All ranks must return the same text.
  virtual std::string disagreement() const { return ""; }
  // Called only after all ranks have agreed. Passes a peer's message to take_eager() or take() if
  // the plan expects exactly this message. Otherwise throws Error(CGX_PEER_FAILED), which names the
  // sender.
  virtual void deliver_eager(int source, Bytes payload);
  virtual void deliver(int part, Arrival arrival);
  virtual Step step(Port& port) = 0;
  virtual bool finished() const = 0;
  // Whether messages of a rank are missing, and the current phase, for error texts.
  virtual bool waits_for(int rank) const = 0;
  virtual const char* phase() const = 0;

 protected:
  // The possible length of the next message from a rank on a part; nullopt if none is expected.
  virtual std::optional<Length> due(int /*source*/, int /*part*/) const { return {}; }
  virtual bool awaits_eager(int /*source*/, size_t bytes) const { return bytes == 0; }
  virtual void take_eager(int /*source*/, Bytes /*payload*/) {}
  virtual void take(int /*part*/, Arrival /*arrival*/) {}
};

// A row of the table of algorithms. `plan.algorithm` is its id.
struct AlgorithmEntry {
  cgx_algorithm_t id;
  const char* name;
  const char* description;
  bool passes_sums_on;  // whether partial sums are sent, not only ranks' own values and results
  int (*shards)(const Plan& plan);
  // The largest payload that this rank sends.
  int64_t (*bytes)(const Plan& plan, const Layout& layout);
  std::unique_ptr<Algorithm> (*make)(Plan plan);
};
// Each in the file of its name.
extern const AlgorithmEntry kOneShot, kSra, kRing, kHierarchical, kHierarchicalScatter,
    kHierarchicalGather, kAllToAll;
// The algorithms that a config can select for an allreduce.
const std::vector<AlgorithmEntry>& algorithm_table();
const AlgorithmEntry& entry_of(cgx_algorithm_t algorithm);
const AlgorithmEntry& entry_of(const Plan& plan);
std::unique_ptr<Algorithm> make_algorithm(Plan plan);

// The largest payload, in bytes, that this rank sends under a plan with a resolved algorithm.
int64_t payload_bytes(const Plan& plan);

// Sets the fields that depend on the ranks' hosts:
//
// - The algorithm. Resolves `auto` from the encoded size and the hosts. Replaces hierarchical by
//   sra if there is only one level.
// - The dtype of partial sums. Uncompressed ones are sent in fp32 whatever the tensor's dtype: fp16
//   could overflow although the result, such as an average, does not. Vote counts are sent
//   uncompressed.
// - Small segments (Packing).
void resolve_algorithm(Plan* plan);

}  // namespace cgx
