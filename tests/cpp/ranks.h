// Threads as ranks, the simplest way to test a collective. All calls go through cgx.h.
#pragma once

#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cgx/cgx.h"

#define CHECK(condition, ...)                                                     \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: %s failed. ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                          \
      std::fprintf(stderr, "\n");                                                 \
      std::abort();                                                               \
    }                                                                             \
  } while (0)

inline void ok(cgx_status_t status) { CHECK(status == CGX_OK, "%s", cgx_last_error()); }

// Communicators of `size` ranks in this process, over the thread transport ("AUTO") or over files
// of shared memory ("SHM").
class Ranks {
 public:
  Ranks(int size, const std::string& transport, double timeout_s, const std::string& name)
      : comms(size) {
    if (transport == "AUTO") {
      ok(cgx_comm_create_local(size, name.c_str(), timeout_s, comms.data()));
      return;
    }
    struct Table {
      explicit Table(int size) : barrier(size), blobs(size) {}
      std::barrier<> barrier;
      std::vector<std::string> blobs;
    } table(size);
    struct Seat {
      Table* table;
      int rank;
    };
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank)
      threads.emplace_back([&, rank] {
        Seat seat{&table, rank};
        auto bootstrap = cgx::make<cgx_bootstrap_t>();
        bootstrap.rank = rank;
        bootstrap.size = size;
        bootstrap.context = &seat;
        bootstrap.allgather = [](void* context, const void* mine, size_t bytes, void* all) {
          const auto* seat = static_cast<Seat*>(context);
          seat->table->blobs[seat->rank].assign(static_cast<const char*>(mine), bytes);
          seat->table->barrier.arrive_and_wait();
          char* to = static_cast<char*>(all);
          for (const auto& blob : seat->table->blobs) {
            std::memcpy(to, blob.data(), bytes);
            to += bytes;
          }
          seat->table->barrier.arrive_and_wait();
          return 0;
        };
        const std::string own = name + "/" + std::to_string(rank);
        bootstrap.name = own.c_str();
        bootstrap.transport = transport.c_str();
        bootstrap.timeout_s = timeout_s;
        ok(cgx_comm_create(&bootstrap, &comms[rank]));
      });
    for (auto& thread : threads) thread.join();
  }
  // Takes existing communicators.
  explicit Ranks(std::vector<int32_t> made) : comms(std::move(made)) {}
  // Ranks close concurrently, since closing waits for peers that still read.
  ~Ranks() {
    run([](int, int32_t comm) { ok(cgx_comm_close(comm)); });
  }

  void run(const std::function<void(int rank, int32_t comm)>& body) const {
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < comms.size(); ++rank)
      threads.emplace_back([&, rank] { body(static_cast<int>(rank), comms[rank]); });
    for (auto& thread : threads) thread.join();
  }

  std::vector<int32_t> comms;
};

// An allreduce of one fp32 segment.
struct Allreduce {
  Allreduce(int32_t comm, std::vector<float>* values, int bits, const std::string& name = "")
      : name_(name), segment_{0, static_cast<int64_t>(values->size()), 512, bits, 0, nullptr} {
    call = cgx::make<cgx_collective_t>();
    call.comm = comm;
    call.op = CGX_SUM;
    call.input = values->data();
    call.output = values->data();
    call.occurrence = -1;
  }
  cgx_request_t* start() {
    cgx_request_t* request = nullptr;
    ok(start(&request));
    return request;
  }
  cgx_status_t start(cgx_request_t** request) {
    complete();
    return cgx_start(&call, nullptr, nullptr, request);
  }
  cgx_status_t run_for(double seconds, cgx_request_t** request) {
    complete();
    return cgx_run_for(&call, seconds, request);
  }
  cgx_status_t run() { return cgx_wait(start()); }

  cgx_collective_t call;

 private:
  void complete() {
    call.segments = &segment_;
    call.num_segments = 1;
    call.name = name_.c_str();
  }

  std::string name_;
  cgx_segment_t segment_;
};
