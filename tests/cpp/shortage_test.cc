// A rank that cannot allocate memory for a call's plan notifies the others, so that they do not
// wait. `make sanitize` runs this test under ThreadSanitizer and AddressSanitizer.
#include <new>

#include "ranks.h"

namespace {

thread_local size_t longest_allocation = SIZE_MAX;  // longer allocations fail

void test_no_memory_for_a_plan(cgx_status_t (*run)(const cgx_collective_t*)) {
  constexpr int64_t kSegments = 100'000;
  const Ranks ranks(2, "AUTO", 60, "no_memory");
  const std::vector<cgx_segment_t> segments(kSegments, {0, 0, 512, 32, 0, nullptr});
  ranks.run([&](int rank, int32_t comm) {
    std::vector<float> values(1000, 1.0f);
    Allreduce allreduce(comm, &values, 32);
    allreduce.call.segments = segments.data();
    allreduce.call.num_segments = kSegments;
    if (rank == 1) longest_allocation = 100'000;
    const cgx_status_t status = run(&allreduce.call);
    longest_allocation = SIZE_MAX;
    const std::string error = cgx_last_error();
    CHECK(status == CGX_SYSTEM && error.find("out of memory") != std::string::npos,
          "rank %d: status %d: %s", rank, status, error.c_str());
    ok(Allreduce(comm, &values, 32).run());  // the communicator remains usable
    CHECK(values[999] == 2.0f, "%g", values[999]);
  });
}

cgx_status_t start_and_wait(const cgx_collective_t* call) {
  cgx_request_t* request = nullptr;
  const cgx_status_t status = cgx_start(call, nullptr, nullptr, &request);
  return status == CGX_OK ? cgx_wait(request) : status;
}

}  // namespace

void* operator new(size_t bytes) {
  void* const memory = bytes <= longest_allocation ? std::malloc(bytes ? bytes : 1) : nullptr;
  if (!memory) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

int main() {
  test_no_memory_for_a_plan(cgx_run);
  test_no_memory_for_a_plan(start_and_wait);
  ok(cgx_finalize());
}
