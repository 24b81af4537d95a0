// Communicators, and the registry of them: the only process-wide state of the core.
//
//   make      from a bootstrap: exchange offers, try the transports in order of preference until
//   one
//             connects all ranks
//   derive    by color or from a list of ranks: the parent is the bootstrap
//   registry  small integers and names; the world is 0
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/group.h"
#include "engine.h"

namespace cgx {

// Three years: no deadline overflows a clock.
inline constexpr double kLongestTimeout = 1e8;

// All ranks' blobs of equal size, in rank order.
using Allgather = std::function<std::vector<Bytes>(const Bytes& mine)>;

class Communicator {
 public:
  using Seconds = std::chrono::duration<double>;

  // No transport: a communicator of one rank. topology: of as many ranks. type: as in env.h.
  Communicator(std::string name, int rank, std::shared_ptr<const Topology> topology,
               std::string type, Seconds timeout, std::unique_ptr<Transport> transport);
  ~Communicator();

  // Throws if the call is malformed or the communicator closed. On one rank the values are copied
  // at once and the collective is done on return.
  // The call as it would run here.
  Plan plan(const cgx_collective_t& call) const;
  std::shared_ptr<Collective> start(const cgx_collective_t& call, cgx_callback_t callback,
                                    void* context);
  // Has `callback` called when it ends; at once, on this thread, if it has. Once, and only if it
  // was started without one.
  void notify(Collective& collective, cgx_callback_t callback, void* context);
  // Until it is done and whoever is notified has returned; throws what it ended with.
  void wait(Collective& collective);
  void run(const cgx_collective_t& call);
  // Tells the peers that this rank takes no part in the collective of that key.
  void refuse(const cgx_collective_t& call, cgx_status_t status, const std::string& message);

  // cgx_enqueue and cgx_comm_check. `device` is where the call's buffers are.
  void enqueue(const cgx_collective_t& call, device::Device& device);
  void check_devices(bool finish);

  // All members' blobs (at most 4 KB each), in the order of `members`. Calls are matched by name.
  std::vector<Bytes> exchange(const std::vector<int>& members, const std::string& name,
                              const Bytes& mine, Seconds at_most);
  // An algorithm as it is, matched by name and number.
  void start(std::unique_ptr<Algorithm> algorithm, const std::string& name, uint64_t number,
             const Agreement& agreement, Seconds at_most, cgx_callback_t callback, void* context);
  void close();

  const std::string name;
  const int rank, size;
  const std::shared_ptr<const Topology> topology;
  const std::string type;
  const Seconds timeout;
  const char* transport_name() const { return engine_ ? engine_->transport_name() : "self"; }
  // "" before the first collective on devices.
  const char* wire_name() const;
  bool closed() const { return engine_ ? engine_->closed() : closed_.load(); }
  bool failed() const { return engine_ && engine_->failed(); }
  int64_t bytes_sent() const { return engine_ ? engine_->bytes_sent() : 0; }
  Totals totals() const;

 private:
  std::shared_ptr<Collective> named(const cgx_collective_t& call) const;  // its key and deadline
  std::shared_ptr<Collective> prepare(const cgx_collective_t& call) const;
  void copy_through(const cgx_collective_t& call, Collective& collective);

  device::Group& devices(device::Device& device);

  const std::unique_ptr<Engine> engine_;
  const int64_t chunk_bytes_;  // of a message
  const std::unique_ptr<device::HostLink> link_;
  std::mutex devices_mutex_;  // held while they connect, and close
  std::unique_ptr<device::Group> devices_;
  std::atomic<device::Group*> connected_ = nullptr;  // the same, for who must not wait
  std::atomic<bool> closed_{false};
  // Of one rank alone; else the engine's.
  mutable std::mutex totals_mutex_;
  Totals totals_;
};

using CommunicatorRef = std::shared_ptr<Communicator>;

// Collective over the bootstrap's ranks. `type`: one of communicator_types(), equal on all.
CommunicatorRef connect(const std::string& name, int rank, int size, const Allgather& allgather,
                        const std::string& type, Communicator::Seconds timeout);
// host_of: by rank, to try on threads what is for several hosts. `type` counts for devices only.
std::vector<CommunicatorRef> connect_local(const std::string& name, std::vector<int> host_of,
                                           Communicator::Seconds timeout,
                                           const std::string& type = "AUTO");
// nullptr for a negative color.
CommunicatorRef split(Communicator& parent, int color, int key, const std::string& name);
CommunicatorRef group(Communicator& parent, const std::vector<int>& ranks, const std::string& name);

class Registry {
 public:
  static Registry& instance();
  static constexpr int32_t kWorld = 0;
  static constexpr const char* kWorldName = "world";

  int32_t add(CommunicatorRef communicator);  // throws if the name is taken
  void add_world(CommunicatorRef communicator);
  void require_free(const std::string& name) const;
  CommunicatorRef get(int32_t id) const;  // throws CGX_NOT_FOUND
  CommunicatorRef find_world() const;     // nullptr before cgx_init
  int32_t find(const std::string& name) const;
  int32_t next(int32_t after) const;  // the smallest id above it, or -1
  CommunicatorRef remove(int32_t id);
  std::vector<CommunicatorRef> remove_all();

 private:
  void require_free_locked(const std::string& name) const;

  mutable std::mutex mutex_;
  std::map<int32_t, CommunicatorRef> communicators_;
  int32_t next_ = kWorld + 1;
};

}  // namespace cgx
