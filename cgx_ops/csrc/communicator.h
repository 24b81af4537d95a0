// A communicator: ranks that reduce together. It turns calls into collectives and hands them to its
// engine (on CPUs) or to its group of devices.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/group.h"
#include "engine/engine.h"

namespace cgx {

// Three years: no deadline overflows a clock.
inline constexpr double kLongestTimeout = 1e8;

// A name of what the core itself exchanges: no collective of a user has such a one.
std::string internal_key(const std::string& name, const std::string& what);

class Communicator {
 public:
  using Seconds = std::chrono::duration<double>;

  // No transport: a communicator of one rank. topology: of as many ranks. type: as in env.h.
  // noise_rank, unread_bytes: as in Plan.
  Communicator(std::string name, int rank, int noise_rank, std::shared_ptr<const Topology> topology,
               std::string type, Seconds timeout, int64_t unread_bytes,
               std::unique_ptr<Transport> transport);
  ~Communicator();

  // The call as it would run here.
  Plan plan(const cgx_collective_t& call) const;
  // Throws if the call is malformed or the communicator closed. On one rank the values are copied
  // at once and the collective is done on return.
  std::shared_ptr<Collective> start(const cgx_collective_t& call, cgx_callback_t callback,
                                    void* context);
  // Has `callback` called when it ends; at once, on this thread, if it has. Once, and only if it
  // was started without one.
  void notify(Collective& collective, cgx_callback_t callback, void* context);
  // Until it is done and whoever is notified has returned; throws what it ended with.
  void wait(Collective& collective);
  // No longer than at_most; returns whether it is done. Throws nothing that it ended with.
  bool wait(Collective& collective, Seconds at_most);
  void run(const cgx_collective_t& call);
  // The same, no longer than at_most; returns the collective if it goes on, else null.
  std::shared_ptr<Collective> run(const cgx_collective_t& call, Seconds at_most);
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
  const int rank, noise_rank, size;
  const std::shared_ptr<const Topology> topology;
  const std::string type;
  const Seconds timeout;
  int64_t strangers() const { return engine_ ? engine_->strangers() : 0; }
  const char* transport_name() const { return engine_ ? engine_->transport_name() : "self"; }
  // "" before the first collective on devices.
  const char* wire_name() const;
  bool closed() const { return engine_ ? engine_->closed() : closed_.load(); }
  // As Engine::finish, for the sake of other processes: ranks that are threads end with this one.
  void finish(Seconds at_most);
  // As Engine::require_peers.
  void require_peers(Seconds at_most);
  // Throws Error(CGX_CLOSED), with the reason, if it is closed.
  void require_open() const;
  bool failed() const { return engine_ && engine_->failed(); }
  int64_t bytes_sent() const { return engine_ ? engine_->bytes_sent() : 0; }
  Totals totals() const;

 private:
  Plan checked(const cgx_collective_t& call) const;  // its algorithm is not picked yet
  Seconds timeout_of(const cgx_collective_t& call) const;
  std::shared_ptr<Collective> named(const cgx_collective_t& call) const;  // its key and deadline
  // Ready for the engine; on one rank, done.
  std::shared_ptr<Collective> prepare(const cgx_collective_t& call);
  std::shared_ptr<Collective> planned(const cgx_collective_t& call);
  void copy_through(const Plan& plan, Collective* collective);

  // Connects the ranks' devices, if nothing has yet.
  device::Group& devices(device::Device& device, Seconds at_most);

  const std::unique_ptr<Engine> engine_;
  const int64_t most_chunk_bytes_, unread_bytes_;  // for plans
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

}  // namespace cgx
