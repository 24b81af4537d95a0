// Runs every algorithm over a transport with one fault (faulty_transport.h), with threads as ranks.
// With every fault, each rank must end, with correct values or with an error:
//
//   none, delay              all values are correct
//   truncate, grow           the receiver's error names the sender
//   duplicate, reorder       as above, or all values are correct if the fault has no effect
//   drop                     a rank times out, unless the fault has no effect
//   foreign                  as above, on the receiver. Other ranks' values are not checked,
//                            since the receiver may have forwarded wrong data before the error
//   flip                     ends. Changed values are not detected, since there is no checksum
//
//   faults_test [first seed] [number of seeds]
#include <atomic>
#include <barrier>
#include <cstdlib>
#include <mutex>
#include <numeric>

#include "algorithm/relay.h"
#include "base/status.h"
#include "communicator.h"
#include "faulty_transport.h"
#include "ranks.h"

namespace {

using namespace cgx;
using Values = std::vector<float>;

constexpr int kCalls = 3;          // consecutive calls on one communicator
constexpr int64_t kMany = 40'000;  // several chunks in each shard
constexpr int64_t kFew = 1'000;    // small enough for headers to carry the values
constexpr int64_t kBucket = 512;   // all values of a bucket are equal, so 8 bits are exact
constexpr double kSoon = 0.4;      // seconds: for faults that end by the deadline
constexpr double kLate = 60;       // for all other faults
constexpr int kWorkers = 8;        // cases run in parallel, since they mostly wait

float value(int rank, int64_t i, int call) {
  return static_cast<float>((i / kBucket * 31 + rank * 17 + call * 5) % 201 - 100);
}
float sum(int size, int64_t i, int call) {
  float total = 0;
  for (int rank = 0; rank < size; ++rank) total += value(rank, i, call);
  return total;
}

// A collective: makes call number `call` and returns whether its values are correct. Throws Error.
using Body = std::function<bool(Communicator&, int call)>;

struct Subject {
  std::string name;
  std::vector<int> hosts;  // the host of each rank
  Body body;
};

cgx_collective_t plain_call(const cgx_segment_t& segment) {
  auto call = make<cgx_collective_t>();
  call.op = CGX_SUM;
  call.segments = &segment;
  call.num_segments = 1;
  call.occurrence = -1;
  return call;
}

Body allreduce(int algorithm, int64_t numel, int bits, const char* name = nullptr) {
  return [=](Communicator& communicator, int number) {
    Values values(numel);
    for (int64_t i = 0; i < numel; ++i) values[i] = value(communicator.rank, i, number);
    const cgx_segment_t segment{0, numel, kBucket, bits, 0, nullptr};
    auto call = plain_call(segment);
    call.config.algorithm = algorithm;
    call.name = name;
    call.input = call.output = values.data();
    communicator.run(call);
    for (int64_t i = 0; i < numel; ++i)
      if (values[i] != sum(communicator.size, i, number)) return false;
    return true;
  };
}

// Starts three named calls, in a different order on each rank.
bool several(Communicator& communicator, int number) {
  constexpr int kTogether = 3;
  const char* const names[kTogether] = {"a", "b", "c"};
  std::vector<Values> values(kTogether);
  std::vector<std::shared_ptr<cgx::Collective>> started;
  for (int i = 0; i < kTogether; ++i) {
    const int which = (i + communicator.rank) % kTogether;
    const int64_t numel = which == 0 ? kFew : kMany / 2;
    for (int64_t at = 0; at < numel; ++at)
      values[which].push_back(value(communicator.rank, at, number + which));
    const cgx_segment_t segment{0, numel, kBucket, 8, 0, nullptr};
    auto call = plain_call(segment);
    call.name = names[which];
    call.input = call.output = values[which].data();
    started.push_back(communicator.start(call, nullptr, nullptr));
  }
  std::optional<Error> failure;  // thrown after all calls ended, since they write to `values`
  for (const auto& each : started) {
    try {
      communicator.wait(*each);
    } catch (const Error& error) {
      if (!failure) failure = error;
    }
  }
  if (failure) throw *failure;
  for (int which = 0; which < kTogether; ++which)
    for (size_t at = 0; at < values[which].size(); ++at)
      if (values[which][at] != sum(communicator.size, static_cast<int64_t>(at), number + which))
        return false;
  return true;
}

void run_on_blocks(Communicator& communicator, cgx_verb_t verb, int64_t block, const Values& input,
                   Values* output) {
  const cgx_segment_t segment{0, block, kBucket, 8, 0, nullptr};
  auto call = plain_call(segment);
  call.verb = verb;
  call.config.algorithm = CGX_HIERARCHICAL;  // sra on one host
  call.input = input.data();
  call.output = output->data();
  communicator.run(call);
}

bool reduce_scatter(Communicator& communicator, int number) {
  const int64_t block = kMany / 2;
  Values input(communicator.size * block), output(block);
  for (size_t i = 0; i < input.size(); ++i)
    input[i] = value(communicator.rank, static_cast<int64_t>(i) % block, number);
  run_on_blocks(communicator, CGX_REDUCE_SCATTER, block, input, &output);
  for (int64_t i = 0; i < block; ++i)
    if (output[i] != sum(communicator.size, i, number)) return false;
  return true;
}

bool all_gather(Communicator& communicator, int number) {
  const int64_t block = kMany / 2;
  Values input(block), output(communicator.size * block);
  for (int64_t i = 0; i < block; ++i) input[i] = value(communicator.rank, i, number);
  run_on_blocks(communicator, CGX_ALL_GATHER, block, input, &output);
  for (size_t i = 0; i < output.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    if (output[i] != value(static_cast<int>(at / block), at % block, number)) return false;
  }
  return true;
}

bool all_to_all(Communicator& communicator, int number) {
  const int64_t block = kMany / 2;
  Values input(communicator.size * block), output(communicator.size * block);
  for (size_t i = 0; i < input.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    input[i] = value(communicator.rank, at % block, number + static_cast<int>(at / block));
  }
  run_on_blocks(communicator, CGX_ALL_TO_ALL, block, input, &output);
  for (size_t i = 0; i < output.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    if (output[i] != value(static_cast<int>(at / block), at % block, number + communicator.rank))
      return false;
  }
  return true;
}

bool exchange(Communicator& communicator, int number) {
  const auto blob = [&](int rank) { return Bytes(300 + rank, std::byte(rank + number)); };
  std::vector<int> everyone(communicator.size);
  std::iota(everyone.begin(), everyone.end(), 0);
  const auto blobs =
      communicator.exchange(everyone, "exchange", blob(communicator.rank), communicator.timeout);
  for (const int rank : everyone)
    if (blobs[rank] != blob(rank)) return false;
  return true;
}

bool relay(Communicator& communicator, int number) {
  const auto blob = [&](int from, int to) {
    return Bytes(100'000, std::byte(from * 10 + to + number));
  };
  const int rank = communicator.rank, size = communicator.size;
  std::vector<Bytes> outgoing, incoming(size, Bytes(100'000));
  for (int peer = 0; peer < size; ++peer) outgoing.push_back(blob(rank, peer));
  struct End {
    std::atomic<bool> here{false};
    cgx_status_t status = CGX_OK;
    std::string error;
  } end;
  communicator.start(
      std::make_unique<Relay>(
          rank, std::vector<std::span<const std::byte>>(outgoing.begin(), outgoing.end()),
          std::vector<std::span<std::byte>>(incoming.begin(), incoming.end())),
      "relay", number, {}, communicator.timeout,
      [](void* context, cgx_status_t status, const char* message) {
        auto* end = static_cast<End*>(context);
        end->status = status;
        end->error = message;
        end->here = true;
        end->here.notify_all();
      },
      &end);
  end.here.wait(false);
  require(end.status == CGX_OK, end.status, end.error);
  for (int peer = 0; peer < size; ++peer)
    if (peer != rank && incoming[peer] != blob(peer, rank)) return false;
  return true;
}

const std::vector<Subject>& subjects() {
  static const std::vector<Subject> all = {
      {"one_shot, eager", {0, 0, 0}, allreduce(CGX_ONE_SHOT, kFew, 32)},
      {"one_shot, eager, named", {0, 0, 0}, allreduce(CGX_ONE_SHOT, kFew, 32, "named")},
      {"one_shot", {0, 0, 0}, allreduce(CGX_ONE_SHOT, kMany, 32)},
      {"sra", {0, 0, 0}, allreduce(CGX_SRA, kMany, 32)},
      {"sra of 8 bits, 2 ranks", {0, 0}, allreduce(CGX_SRA, 4 * kMany, 8)},
      {"ring", {0, 0, 0}, allreduce(CGX_RING, kMany, 32)},
      {"hierarchical", {0, 0, 1, 1}, allreduce(CGX_HIERARCHICAL, kMany, 8)},
      {"several", {0, 0, 0}, several},
      {"reduce_scatter", {0, 0, 0}, reduce_scatter},
      {"all_gather", {0, 0, 0}, all_gather},
      {"hierarchical reduce_scatter", {0, 0, 1, 1}, reduce_scatter},
      {"hierarchical all_gather", {0, 0, 1, 1}, all_gather},
      {"all_to_all", {0, 0, 0}, all_to_all},
      {"exchange", {0, 0, 0}, exchange},
      {"relay", {0, 0}, relay},
  };
  return all;
}

// The outcome of a rank: correct values, wrong values, or an error.
struct End {
  bool right = true;
  std::string error;
};

// Only the receiver has the fault.
std::vector<CommunicatorRef> connect(const std::vector<int>& hosts, int receiver, double timeout_s,
                                     const std::shared_ptr<Fault>& fault) {
  const Communicator::Seconds timeout(timeout_s);
  const auto topology = std::make_shared<const Topology>(hosts);
  const int size = topology->size();
  std::vector<std::unique_ptr<Connector>> connectors;
  std::vector<Bytes> offers;
  for (int rank = 0; rank < size; ++rank) {
    connectors.push_back(make_thread_connector(rank, size));
    offers.push_back(connectors.back()->offer());
  }
  std::vector<CommunicatorRef> communicators;
  for (int rank = 0; rank < size; ++rank) {
    auto transport = connectors[rank]->connect(offers, {std::vector<bool>(size, true), timeout});
    const auto own = rank == receiver ? fault : std::make_shared<Fault>();
    communicators.push_back(std::make_shared<Communicator>(
        join("faults/", rank), rank, rank, topology, "AUTO", timeout, INT64_MAX,
        std::make_unique<FaultyTransport>(std::move(transport), rank, size, own)));
  }
  return communicators;
}

std::vector<End> run(const Subject& subject, int receiver, double timeout_s,
                     const std::shared_ptr<Fault>& fault) {
  const auto communicators = connect(subject.hosts, receiver, timeout_s, fault);
  std::vector<End> ends(communicators.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < ends.size(); ++rank)
    threads.emplace_back([&, rank] {
      Communicator& own = *communicators[rank];
      try {
        for (int call = 0; call < kCalls && ends[rank].right; ++call)
          ends[rank].right = subject.body(own, call);
      } catch (const Error& error) {
        ends[rank].error = error.what();
      }
      own.close();
    });
  for (auto& thread : threads) thread.join();
  return ends;
}

struct Case {
  const Subject* subject;
  Fault fault;
  int receiver;

  std::string text() const {
    return join(subject->name, ": ", kFaultNames[static_cast<int>(fault.kind)], " of ",
                kTrafficNames[static_cast<int>(fault.traffic)], " message ", fault.nth, " to rank ",
                receiver, ", seed ", fault.seed);
  }
};

bool waits_for_deadline(FaultKind kind) {
  return kind == FaultKind::kDrop || kind == FaultKind::kFlip || kind == FaultKind::kForeign;
}

// Returns how the case violates the rules above, "" if it does not.
std::string violation(const Case& each) {
  const FaultKind kind = each.fault.kind;
  // With a short deadline, a busy machine may time out without a fault.
  const bool soon = waits_for_deadline(kind);
  const auto fault = std::make_shared<Fault>(each.fault);
  const auto ends = run(*each.subject, each.receiver, soon ? kSoon : kLate, fault);
  const bool harmless = kind == FaultKind::kNone || kind == FaultKind::kDelay || fault->sender < 0;
  for (size_t rank = 0; rank < ends.size(); ++rank) {
    const auto& [right, error] = ends[rank];
    const bool is_checked = kind != FaultKind::kFlip && (kind != FaultKind::kForeign ||
                                                         static_cast<int>(rank) == each.receiver);
    if (!right && is_checked) return join("wrong values on rank ", rank);
    if (harmless && !soon && !error.empty()) return join("an error on rank ", rank, ": ", error);
  }
  const std::string& error_text = ends[each.receiver].error;
  const bool must_fail = kind == FaultKind::kTruncate || kind == FaultKind::kGrow;
  if (harmless || (error_text.empty() && !must_fail)) return "";
  if (error_text.empty()) return "the receiver accepts the message";
  if (!soon && error_text.find(join("rank ", fault->sender)) == std::string::npos)
    return join("the error does not name the sender, rank ", fault->sender, ": ", error_text);
  return "";
}

std::vector<Case> cases(unsigned first_seed, unsigned seeds) {
  std::vector<Case> all;
  for (unsigned seed = first_seed; seed < first_seed + seeds; ++seed) {
    for (const auto& subject : subjects()) {
      for (size_t kind = 0; kind < kFaultNames.size(); ++kind) {
        for (const Traffic traffic : {Traffic::kControl, Traffic::kBulk}) {
          std::mt19937 random(static_cast<unsigned>(seed * 1009 + all.size()));
          const auto size = static_cast<unsigned>(subject.hosts.size());
          const unsigned messages = traffic == Traffic::kControl ? kCalls * (size - 1) : 20;
          all.push_back({&subject,
                         {static_cast<FaultKind>(kind), traffic,
                          static_cast<int>(random() % messages), static_cast<unsigned>(random())},
                         static_cast<int>(random() % size)});
        }
      }
    }
  }
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned first_seed = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 0;
  const unsigned seeds = argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 3;
  const auto all = cases(first_seed, seeds);
  std::atomic<size_t> next = 0, bad = 0;
  std::vector<std::thread> workers;
  for (int worker = 0; worker < kWorkers; ++worker)
    workers.emplace_back([&] {
      for (size_t i = next++; i < all.size(); i = next++) {
        const std::string found = violation(all[i]);
        if (found.empty()) continue;
        ++bad;
        std::fprintf(stderr, "%s: %s\n", all[i].text().c_str(), found.c_str());
      }
    });
  for (auto& worker : workers) worker.join();
  std::printf("%zu cases, %zu failed\n", all.size(), bad.load());
  return bad == 0 ? 0 : 1;
}
