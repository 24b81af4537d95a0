// Two transports in one process, without engines: what a rank that has left still takes in, when
// its peers may already write to the memory of what they sent it; and what is taken in of it.
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

void one_that_is_here_takes_it() {
  const auto transports = two();
  const auto state = send(*transports[0]);
  Counts sink;
  transports[1]->progress(sink);
  CHECK(sink.messages == 1, join(sink.messages, " messages"));
  transports[0]->progress(sink);
  CHECK(state->unreleased() == 0, "the sender has its message back");
}

void one_that_has_left_takes_nothing(bool graceful) {
  const auto transports = two();
  const auto state = send(*transports[0]);
  transports[1]->leave(graceful, "the test leaves");
  Counts sink;
  transports[1]->progress(sink);
  CHECK(sink.messages == 0, join(sink.messages, " messages"));
  transports[0]->progress(sink);
  CHECK(sink.losses == 1, join(sink.losses, " losses"));
  CHECK(state->unreleased() == 0, "the sender has its message back");
}

// It does not wait until a collective that it has cancelled is read.
void what_one_that_is_gone_has_said_is_heard() {
  auto transports = two();
  send(*transports[0])->give_up();
  transports[0]->send_control(1, to_bytes(uint32_t{1}));
  CHECK(transports[0]->drained(), "it may leave");
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
  one_that_is_here_takes_it();
  one_that_has_left_takes_nothing(/*graceful=*/true);
  one_that_has_left_takes_nothing(/*graceful=*/false);
  what_one_that_is_gone_has_said_is_heard();
  return cgx::test::report();
}
