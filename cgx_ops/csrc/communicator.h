// A communicator: ranks that reduce together. It converts calls to collectives and passes them to
// its engine (CPU) or to its group of devices (GPU).
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

// About three years, so that no deadline overflows a clock.
inline constexpr double kLongestTimeout = 1e8;

// The name of an internal exchange, which differs from all names of users.
std::string internal_key(const std::string& name, const std::string& what);

class Communicator {
 public:
  using Seconds = std::chrono::duration<double>;

  // A null transport makes a communicator of one rank. `topology` has as many ranks. `type`: as in
  // env.h. noise_rank, unread_bytes: as in Plan.
  Communicator(std::string name, int rank, int noise_rank, std::shared_ptr<const Topology> topology,
               std::string type, Seconds timeout, int64_t unread_bytes,
               std::unique_ptr<Transport> transport, bool elastic = false);
  ~Communicator();

  // Plans the call.
  Plan plan(const cgx_collective_t& call) const;
  // Throws if the call is invalid or the communicator closed. With one rank, values are copied
  // immediately, and the collective is done on return.
  std::shared_ptr<Collective> start(const cgx_collective_t& call, cgx_callback_t callback,
                                    void* context);
  // Calls `callback` when the collective ends, immediately if it has. At most once, and only if it
  // was started without a callback.
  void notify(Collective& collective, cgx_callback_t callback, void* context);
  // Waits until it is done and its callback has returned. Throws the collective's failure.
  void wait(Collective& collective);
  // Waits at most for at_most and returns whether it is done. Does not throw the collective's
  // failure.
  bool wait(Collective& collective, Seconds at_most);
  void run(const cgx_collective_t& call);
  // The same, at most for at_most. Returns the collective if it still runs, else null.
  std::shared_ptr<Collective> run(const cgx_collective_t& call, Seconds at_most);
  // Announces that this rank takes no part in the collective with this key.
  void refuse(const cgx_collective_t& call, cgx_status_t status, const std::string& message);

  // cgx_enqueue, cgx_refuse of such a call, and cgx_comm_check. `device` is where the call's
  // buffers are.
  void enqueue(const cgx_collective_t& call, device::Device& device);
  void refuse(const cgx_collective_t& call, device::Device& device, const std::string& message);
  void check_devices(bool finish);

  // Returns the blobs of all members (at most 4 KB each), in the order of `members`. Calls are
  // matched by name.
  std::vector<Bytes> exchange(const std::vector<int>& members, const std::string& name,
                              const Bytes& mine, Seconds at_most);
  // Starts an algorithm, matched by name and number.
  void start(std::unique_ptr<Algorithm> algorithm, const std::string& name, uint64_t number,
             const Agreement& agreement, Seconds at_most, cgx_callback_t callback, void* context);
  void close();
  // See Engine::abort. Collectives on GPUs end first, at the latest at their deadlines.
  void abort(const std::string& reason);

  const std::string name;
  const int rank, noise_rank, size;
  const std::shared_ptr<const Topology> topology;
  const std::string type;
  const Seconds timeout;
  const bool elastic;  // as in connect.h; groups of its ranks inherit it
  int64_t rejected_connections() const { return engine_ ? engine_->rejected_connections() : 0; }
  const char* transport_name() const { return engine_ ? engine_->transport_name() : "self"; }
  // "" before the first collective on GPUs.
  const char* wire_name() const;
  bool closed() const { return engine_ ? engine_->closed() : closed_.load(); }
  // See Engine::finish. Does nothing for ranks that are threads, since they end with this process.
  void finish(Seconds at_most);
  // See Engine::require_peers.
  void require_peers(Seconds at_most);
  // Throws Error(CGX_CLOSED), with the reason, if it is closed.
  void require_open() const;
  bool failed() const { return engine_ && engine_->failed(); }
  int64_t bytes_sent() const { return engine_ ? engine_->bytes_sent() : 0; }
  Totals totals() const;

 private:
  Plan checked(const cgx_collective_t& call) const;  // with an unresolved algorithm
  Seconds timeout_of(const cgx_collective_t& call) const;
  std::shared_ptr<Collective> named(
      const cgx_collective_t& call) const;  // sets the key and the deadline
  // Ready for the engine or, with one rank, done.
  std::shared_ptr<Collective> prepare(const cgx_collective_t& call);
  std::shared_ptr<Collective> planned(const cgx_collective_t& call);
  void copy_through(const Plan& plan, Collective* collective);

  void close_devices(Seconds at_most);
  // Connects the ranks' GPUs, if they are not connected.
  device::Group& devices(device::Device& device, Seconds at_most);

  const std::unique_ptr<Engine> engine_;
  const int64_t most_chunk_bytes_, unread_bytes_;  // for plans
  const std::unique_ptr<device::HostLink> link_;
  std::mutex devices_mutex_;  // held while devices connect and close
  std::unique_ptr<device::Group> devices_;
  std::atomic<device::Group*> connected_ = nullptr;  // the same, without a lock
  std::atomic<bool> closed_{false};
  // Used with one rank only; otherwise the engine has them.
  mutable std::mutex totals_mutex_;
  Totals totals_;
};

using CommunicatorRef = std::shared_ptr<Communicator>;

}  // namespace cgx
