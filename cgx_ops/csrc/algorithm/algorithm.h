// An algorithm decides who sends what when. It is a state machine that never waits: the engine
// hands it messages, asks it for one bounded step after another, and may have any number of others
// in flight.
#pragma once

#include <memory>
#include <string>
#include <vector>

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
  static constexpr int64_t kNone = -1;

  // Bytes of the next message that is due from a rank on a part, or kNone.
  virtual int64_t due(int /*source*/, int /*part*/) const { return kNone; }
  virtual bool awaits_eager(int /*source*/, size_t bytes) const { return bytes == 0; }
  virtual void take_eager(int /*source*/, Bytes /*payload*/) {}
  virtual void take(int /*part*/, Arrival /*arrival*/) {}
};

struct AlgorithmEntry {
  cgx_algorithm_t id;
  const char* name;
  const char* description;
  bool passes_sums_on;  // partial sums travel, not only each rank's own values and results
  std::unique_ptr<Algorithm> (*make)(Plan plan);
};
const std::vector<AlgorithmEntry>& algorithm_table();
std::unique_ptr<Algorithm> make_algorithm(Plan plan);

// Settles what follows from the ranks' hosts, which the plan knows by now:
//   - the algorithm: what `auto` stands for, by the plan's encoded size and its hosts; hierarchical
//     is sra where hosts make only one level; anything else stays
//   - the dtype of partial sums: exact ones travel in fp32, whatever the tensor's dtype is, because
//     fp16 would overflow where the result, such as an average, need not
void resolve_algorithm(Plan* plan);

std::unique_ptr<Algorithm> make_one_shot(Plan plan);
std::unique_ptr<Algorithm> make_sra(Plan plan);
std::unique_ptr<Algorithm> make_ring(Plan plan);
std::unique_ptr<Algorithm> make_hierarchical(Plan plan);

}  // namespace cgx
