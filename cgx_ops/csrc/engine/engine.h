// The engine of one rank of one communicator: any number of collectives in flight, started in any
// order, on any threads.
//
//   submit   a collective gets its key and is announced to every member by a header. No collective
//            waits for an order to be agreed on: headers are matched by key.
//   agree    when every member's header is here they are compared: all ranks see the same, so all
//            go on, or all end with one error. Values move only after that
//   run      the algorithm's state machine, fed by messages, in bounded steps. A rank that is short
//            of something cancels the collective on all ranks; the others go on
//   end      done, or failed: a passed deadline, a lost peer or a message that makes no sense ends
//            every collective and closes the communicator, and says so to the peers. Who asked to
//            be notified is called, then those who wait go on
//
// One thread at a time holds the progress role: a caller blocked in wait(), else the progress
// thread, which sleeps while nothing is in flight and nothing waits to be handed over.
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
  ~Engine() override;  // close() first

  // Never blocks on a peer. Throws Error(CGX_CLOSED) if the communicator is closed.
  void submit(const std::shared_ptr<Collective>& collective);
  // submit and wait: the progress thread sleeps on.
  void run(const std::shared_ptr<Collective>& collective);
  void run(const std::shared_ptr<Collective>& collective, Clock::duration at_most);
  // Until collective->done; drives progress. The deadline of the collective bounds it.
  void wait(Collective& collective);
  // The same, no longer than at_most: then the progress thread goes on with it.
  void wait(Collective& collective, Clock::duration at_most);
  // Has `callback` called at the end of a submitted collective, before `done`; returns false if it
  // has ended. Once per collective.
  bool notify(Collective& collective, cgx_callback_t callback, void* context);

  // Looks for lost peers, no longer than at_most. Throws Error(CGX_PEER_FAILED), with the reasons,
  // if they, or the communicator, are lost. With nothing in flight the progress thread does not
  // look.
  void require_peers(Clock::duration at_most);

  // Waits until no collective is in flight, no longer than at_most; their deadlines bound it, too.
  void finish(Clock::duration at_most);

  // Waits until peers have read what they were sent, no longer than at_most, then leaves.
  void close(std::chrono::duration<double> at_most);

  bool closed() const { return closed_.load(); }
  // Throws Error(CGX_CLOSED), with the reason, if the communicator is closed.
  void require_open() const;
  // It, or a peer, did not end in good order.
  bool failed() const { return failed_ || peer_failed_; }
  int64_t bytes_sent() const { return bytes_sent_.load(); }
  Totals totals() const;
  int64_t strangers() const { return transport_->strangers(); }
  const char* transport_name() const { return transport_->name(); }

 private:
  class CollectivePort;
  using CollectiveRef = std::shared_ptr<Collective>;

  std::string closed_text() const;  // with mutex_ held, or the role after a failure
  void put(const CollectiveRef& collective);
  template <typename Done>
  void wait_until(Done&& done, std::optional<Clock::time_point> limit);

  // The progress role.
  bool try_take_role();
  void give_role();
  void need_thread();
  void progress_thread();

  // Below: only with the role.
  template <typename Until>
  void drive(Until&& until);  // progress, or sleep, until that is true
  bool anything_submitted();
  bool progress();
  template <typename Work>
  void guard(Work&& work);  // a failure of the transport ends everything
  void accept(const CollectiveRef& collective);
  void match(const CollectiveRef& collective, int source, Header header);
  void agree(Collective& collective);
  void cancel(Collective& collective);  // for its shortage
  void inquire(Collective& collective);
  std::vector<int32_t> awaited(const Collective& collective) const;
  std::set<int> late(const Collective& collective) const;
  // What peers' control messages say.
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
  void check_waits();  // deadlines, lost peers
  void finish(Collective& collective, cgx_status_t status, std::string error);
  void end(Collective& collective, cgx_status_t status, std::string error);
  // `told`: the reason is what a peer that gave up said. `cause`: whose deadline it was, if any.
  void fail_all(cgx_status_t status, const std::string& reason, Collective* cause = nullptr,
                bool told = false);
  void tell_abort(const std::string& news);
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
  std::condition_variable changed_;     // a collective ended, or the role is free
  std::condition_variable work_given_;  // for the progress thread
  bool role_taken_ = false;
  bool unflushed_ = false;  // the transport still has messages to hand over
  std::atomic<bool> stop_{false};
  std::vector<CollectiveRef> submitted_;
  std::string close_reason_, losses_;  // the latter: of peers, so far
  uint64_t unnamed_ = 0;               // collectives without a name
  int callbacks_in_flight_ = 0;
  Totals totals_;
  std::thread thread_;
  std::atomic<bool> closed_{false}, failed_{false}, peer_failed_{false}, peer_lost_{false};
  std::atomic<int> in_flight_{0};
  std::atomic<int64_t> bytes_sent_{0};

  // With the role.
  std::unordered_multimap<Key, CollectiveRef, KeyHash> running_;
  // What is known of one key, until it is used up. A rank's n-th header belongs to this rank's n-th
  // collective of the key, so nothing needs to be counted for longer.
  struct Uses {
    std::vector<CollectiveRef> open;            // lack headers; oldest first
    std::vector<std::pair<int, Header>> early;  // of collectives that are not started here yet
  };
  std::unordered_map<Key, Uses, KeyHash> uses_;
  // A peer's bulk messages of one collective.
  struct Incoming {
    Collective* collective;
    uint32_t next[2] = {0, 0};  // sequence of the message that comes next, by part
  };
  static uint64_t incoming_key(int source, uint32_t serial) {
    return static_cast<uint64_t>(source) << 32 | serial % kSerials;
  }
  Collective* receiver(int source, Slot slot);
  std::unordered_map<uint64_t, Incoming> incoming_;     // by source and its serial
  std::vector<uint32_t> headers_sent_, headers_taken_;  // by destination, by source
  std::vector<uint32_t> last_serial_;                   // by source, of its headers
  std::deque<Collective*> ready_;
  std::vector<Collective*> blocked_;
  std::vector<Collective*> finishing_;  // computed; their sends are not handed over yet
  struct Lost {
    Loss how;
    std::string reason;
  };
  std::vector<std::optional<Lost>> lost_;  // by rank
  uint32_t next_serial_ = 0;
  Clock::time_point now_{};  // when the last pass of progress() ended
  Clock::time_point next_check_{};
};

}  // namespace cgx
