// Two transports in one process, without engines. After a rank has left, its peers may overwrite
// the memory of their messages, so it must not read them. Its own control messages still arrive.
#include "transport/transport.h"

#include <cstring>
#include <vector>

#include "checks.h"

namespace {

using namespace cgx;

class Counts : public Sink {
 public:
  void on_control(int, std::span<const std::byte>) override { ++controls; }
  void on_bulk(Arrival) override { ++messages; }
  void on_unreadable(int, Slot, const Error&) override { ++messages; }
  void on_peer_lost(int, Loss, const std::string&) override { ++losses; }
  int controls = 0, messages = 0, losses = 0;
};

std::vector<std::unique_ptr<Transport>> two() {
  std::vector<std::unique_ptr<Connector>> connectors;
  std::vector<Bytes> offers;
  for (int rank = 0; rank < 2; ++rank) {
    connectors.push_back(make_thread_connector(rank, 2));
    offers.push_back(connectors.back()->offer());
  }
  std::vector<std::unique_ptr<Transport>> transports;
  for (const auto& connector : connectors)
    transports.push_back(connector->connect(offers, {{true, true}, std::chrono::seconds(1)}));
  return transports;
}

std::shared_ptr<SendState> send(Transport& from) {
  const auto state = std::make_shared<SendState>(2);
  const BufferRef buffer = from.allocate(100);
  std::memset(buffer->data, 1, 100);
  from.send(1, {}, buffer, 100, state);
  return state;
}

void a_connected_rank_receives_messages() {
  const auto transports = two();
  const auto state = send(*transports[0]);
  Counts sink;
  transports[1]->progress(sink);
  CHECK(sink.messages == 1, join(sink.messages, " messages"));
  transports[0]->progress(sink);
  CHECK(state->unreleased() == 0, "the sender's memory is not released");
}

void a_rank_that_left_receives_nothing(bool graceful) {
  const auto transports = two();
  const auto state = send(*transports[0]);
  transports[1]->leave(graceful, "the test leaves");
  Counts sink;
  transports[1]->progress(sink);
  CHECK(sink.messages == 0, join(sink.messages, " messages"));
  transports[0]->progress(sink);
  CHECK(sink.losses == 1, join(sink.losses, " losses"));
  CHECK(state->unreleased() == 0, "the sender's memory is not released");
}

// Leaving does not wait until a message of a cancelled collective is read.
void control_messages_of_a_rank_that_left_arrive() {
  auto transports = two();
  send(*transports[0])->give_up();
  transports[0]->send_control(1, to_bytes(uint32_t{1}));
  CHECK(transports[0]->drained(), "the rank cannot leave");
  transports[0]->leave(true, "the test leaves");
  transports[0].reset();
  Counts sink;
  transports[1]->progress(sink);
  CHECK(sink.messages == 0, join(sink.messages, " messages"));
  CHECK(sink.controls == 1, join(sink.controls, " control messages"));
  CHECK(sink.losses == 1, join(sink.losses, " losses"));
}

}  // namespace

int main() {
  a_connected_rank_receives_messages();
  a_rank_that_left_receives_nothing(/*graceful=*/true);
  a_rank_that_left_receives_nothing(/*graceful=*/false);
  control_messages_of_a_rank_that_left_arrive();
  return cgx::test::report();
}
