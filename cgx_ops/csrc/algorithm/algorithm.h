// An algorithm decides who sends what when. It is a state machine that never waits: the engine
// hands it messages, asks it for one bounded step after another, and may have any number of others
// in flight.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "algorithm/layout.h"
#include "plan.h"
#include "transport/transport.h"

namespace cgx {

// What an algorithm may ask of the world, for its own collective.
class Port {
 public:
  virtual ~Port() = default;
  virtual BufferRef allocate(size_t bytes) = 0;
  // `part` (0 or 1) keeps two streams to one destination apart; each is ordered.
  virtual void send(int destination, int part, const BufferRef& buffer, size_t bytes) = 0;
  virtual int unreleased() const = 0;  // messages that peers have not read yet
};

enum class Step {
  kWorked,   // call again
  kIdle,     // nothing to do until a message arrives
  kBlocked,  // too much is in flight: call again when peers have read some
};

class Algorithm {
 public:
  virtual ~Algorithm() = default;
  // What rides in the header that announces the collective; asked once, before anything else. The
  // peers' come with theirs.
  virtual Bytes eager() { return {}; }
  // From here on all ranks are known to agree. What peers send is given to take_eager() and take()
  // only if this rank's own plan awaits just that; else these throw Error(CGX_PEER_FAILED), which
  // names the sender.
  void deliver_eager(int source, Bytes payload);
  void deliver(int part, Arrival arrival);
  virtual Step step(Port& port) = 0;
  virtual bool finished() const = 0;
  // Messages of this rank are still missing; and in which phase it is, for the error text.
  virtual bool waits_for(int rank) const = 0;
  virtual const char* phase() const = 0;

 protected:
  // What the next message that is due from a rank on a part may have; nothing if none is due.
  virtual std::optional<Length> due(int /*source*/, int /*part*/) const { return {}; }
  virtual bool awaits_eager(int /*source*/, size_t bytes) const { return bytes == 0; }
  virtual void take_eager(int /*source*/, Bytes /*payload*/) {}
  virtual void take(int /*part*/, Arrival /*arrival*/) {}
};

// A row of the table. The plan's algorithm is this one.
struct AlgorithmEntry {
  cgx_algorithm_t id;
  const char* name;
  const char* description;
  bool passes_sums_on;  // partial sums travel, not only each rank's own values and results
  bool sliced;          // cuts values into shards: serves codecs that can be cut, no others
  int (*shards)(const Plan& plan);
  // Of payload, that this rank sends, at most.
  int64_t (*bytes)(const Plan& plan, const Layout& layout);
  std::unique_ptr<Algorithm> (*make)(Plan plan);
};
extern const AlgorithmEntry kOneShot, kSra, kRing, kHierarchical;  // each in a file of its name
const std::vector<AlgorithmEntry>& algorithm_table();
const AlgorithmEntry& entry_of(cgx_algorithm_t algorithm);
std::unique_ptr<Algorithm> make_algorithm(Plan plan);

// Bytes of payload that this rank sends, at most, under a plan whose algorithm is resolved.
int64_t payload_bytes(const Plan& plan);

// Settles what follows from the ranks' hosts, which the plan knows by now:
//   - the algorithm: what `auto` stands for, by the plan's encoded size, its codecs and its hosts;
//     hierarchical is sra where hosts make only one level; anything else stays, or is refused with
//     Error(CGX_UNSUPPORTED) if it cannot cut what a codec encodes as one whole
//   - the dtype of partial sums: exact ones travel in fp32, whatever the tensor's dtype is, because
//     fp16 would overflow where the result, such as an average, need not. Counts of votes are exact
void resolve_algorithm(Plan* plan);

}  // namespace cgx
