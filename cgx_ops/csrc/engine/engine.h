// The engine of one rank of one communicator. It runs any number of concurrent collectives, started
// in any order and on any threads. A collective passes these steps:
//
//   submit   It gets its key and is announced to every member by a header. Headers are matched by
//            key, so ranks need not start collectives in the same order.
//   agree    When the headers of all members have arrived, they are compared. All ranks see the
//            same headers, so all continue, or all end with the same error. Values are sent only
//            after that.
//   run      Messages drive the algorithm's state machine, in bounded steps. A rank that lacks a
//            resource cancels the collective on all ranks; other collectives continue.
//   end      Success or failure. A missed deadline, a lost peer or a malformed message ends all
//            collectives, closes the communicator and notifies the peers. But the loss of a peer
//            ends an announcement alone. The callback runs first, then waiters return.
//
// One thread at a time holds the progress role: a caller blocked in wait(), otherwise the progress
// thread. That sleeps while nothing is in flight and nothing remains to be flushed.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <unordered_map>

#include "engine/collective.h"

namespace cgx {

class Engine : private Sink {
 public:
  Engine(std::string name, int rank, int size, std::unique_ptr<Transport> transport);
  ~Engine() override;  // call close() first

  // Never blocks on a peer. Throws Error(CGX_CLOSED) if the communicator is closed.
  void submit(const std::shared_ptr<Collective>& collective);
  // Like submit() and wait(), but does not wake the progress thread.
  void run(const std::shared_ptr<Collective>& collective);
  void run(const std::shared_ptr<Collective>& collective, Clock::duration at_most);
  // Blocks until collective->done and drives progress. The collective's deadline bounds the wait.
  void wait(Collective& collective);
  // The same, at most for at_most. After that the progress thread continues.
  void wait(Collective& collective, Clock::duration at_most);
  // Registers `callback`, which is called at the end of a submitted collective, before `done`.
  // Returns false if the collective has ended. At most once per collective.
  bool notify(Collective& collective, cgx_callback_t callback, void* context);

  // Checks for lost peers, at most for at_most. Throws Error(CGX_PEER_FAILED) with the reasons if
  // peers or the communicator are lost. Needed because the progress thread does not check while
  // nothing is in flight.
  void require_peers(Clock::duration at_most);

  // Waits until only announcements are in flight, at most for at_most.
  void finish(Clock::duration at_most);

  // Waits until peers have read all messages, at most for at_most, then leaves.
  void close(std::chrono::duration<double> at_most);
  // Ends all collectives, here and on the peers, with this reason. Peers have only a moment to read
  // what was sent to them.
  void abort(const std::string& reason);

  bool closed() const { return closed_.load(); }
  // Throws Error(CGX_CLOSED) with the reason if the communicator is closed.
  void require_open() const;
  // Whether this rank or a peer ended with a failure.
  bool failed() const { return failed_ || peer_failed_; }
  int64_t bytes_sent() const { return bytes_sent_.load(); }
  Totals totals() const;
  int64_t rejected_connections() const { return transport_->rejected_connections(); }
  const char* transport_name() const { return transport_->name(); }

 private:
  class CollectivePort;
  using CollectiveRef = std::shared_ptr<Collective>;

  std::string closed_text() const;  // needs mutex_, or the role after a failure
  void put(const CollectiveRef& collective);
  template <typename Done>
  void wait_until(Done&& done, std::optional<Clock::time_point> limit);
  // `failed`: also ends the peers' collectives.
  void stop(std::chrono::duration<double> at_most, const std::string& reason, bool failed);

  // The progress role.
  bool try_take_role();
  void give_role();
  void need_thread();
  void progress_thread();

  // The functions below need the role.
  template <typename Until>
  void drive(Until&& until);  // makes progress or sleeps until the condition holds
  bool anything_submitted();
  bool progress();
  template <typename Work>
  void guard(Work&& work);  // ends all collectives if the transport fails
  void accept(const CollectiveRef& collective);
  void match(const CollectiveRef& collective, int source, Header header);
  void agree(Collective& collective);
  void cancel(Collective& collective);  // because of its shortage
  void inquire(Collective& collective);
  std::vector<int32_t> awaited(const Collective& collective) const;
  std::set<int> late(const Collective& collective) const;
  // Handlers of the peers' control messages.
  void take(int source, Header header);
  void take(int source, const Cancel& cancel);
  void take(int source, const Abort& abort);
  void take(int source, const Ask& ask);
  void take(int source, Answer answer);
  void retract(Collective& collective, int source);
  void forget_early(int source);
  bool run_queue();
  void enqueue(Collective& collective);
  void dequeue(Collective& collective);
  void check_waits();  // checks deadlines and lost peers
  std::optional<int> lost_member(const Collective& collective) const;  // that it waits for
  void drop(Collective& announcement, cgx_status_t status, const std::string& reason);
  void drop_announcements(const std::string& reason);  // at the close
  void finish(Collective& collective, cgx_status_t status, std::string error);
  void end(Collective& collective, cgx_status_t status, std::string error);
  // `from_peer`: a peer that gave up sent this reason. `cause`: the collective whose deadline
  // passed, if any.
  void fail_all(cgx_status_t status, const std::string& reason, Collective* cause = nullptr,
                bool from_peer = false);
  void send_abort(const std::string& reason);
  std::string describe_wait(const Collective& collective) const;
  std::string loss_text(int rank) const;
  bool waits_for(const Collective& collective, int rank) const;

  void on_control(int source, std::span<const std::byte> message) override;
  void on_bulk(Arrival arrival) override;
  void on_unreadable(int source, Slot slot, const Error& error) override;
  void on_peer_lost(int rank, Loss how, const std::string& reason) override;

  const std::string name_;
  const int rank_, size_;
  const std::unique_ptr<Transport> transport_;
  const bool crowded_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;     // a collective has ended, or the role is free
  std::condition_variable work_given_;  // wakes the progress thread
  bool role_taken_ = false;
  bool unflushed_ = false;  // the transport still has messages to flush
  std::atomic<bool> stop_{false};
  std::vector<CollectiveRef> submitted_;
  std::string close_reason_, losses_;  // reasons: of the closing; of the peers lost so far
  uint64_t unnamed_ = 0;               // number of collectives without a name
  int callbacks_in_flight_ = 0;
  Totals totals_;
  std::thread thread_;
  std::atomic<bool> closed_{false}, failed_{false}, peer_failed_{false}, peer_lost_{false};
  std::atomic<int> in_flight_{0}, needed_{0};  // needed: not announcements
  std::atomic<int64_t> bytes_sent_{0};

  // Guarded by the role.
  std::unordered_multimap<Key, CollectiveRef, KeyHash> running_;
  // The open state of a key. A rank's n-th header of a key belongs to this rank's n-th collective
  // of that key, so entries are erased when no header or collective is open.
  struct Uses {
    std::vector<CollectiveRef> open;            // waiting for headers; oldest first
    std::vector<std::pair<int, Header>> early;  // headers of collectives that have not started here
  };
  std::unordered_map<Key, Uses, KeyHash> uses_;
  // State of a peer's bulk messages for one collective.
  struct Incoming {
    Collective* collective;
    uint32_t next[2] = {0, 0};  // next expected sequence, per part
  };
  static uint64_t incoming_key(int source, uint32_t serial) {
    return static_cast<uint64_t>(source) << 32 | serial % kSerials;
  }
  Collective* receiver(int source, Slot slot);
  std::unordered_map<uint64_t, Incoming> incoming_;     // by source and its serial
  std::vector<uint32_t> headers_sent_, headers_taken_;  // per destination; per source
  std::vector<uint32_t> last_serial_;                   // per source, of its last header
  std::deque<Collective*> ready_;
  std::vector<Collective*> blocked_;
  std::vector<Collective*> finishing_;  // computed, but not everything is sent yet
  struct Lost {
    Loss how;
    std::string reason;
  };
  std::vector<std::optional<Lost>> lost_;  // per rank
  uint32_t next_serial_ = 0;
  Clock::time_point now_{};  // end of the last pass of progress()
  Clock::time_point next_check_{};
};

}  // namespace cgx
