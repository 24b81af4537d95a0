// Device memory on a GPU: initial contents, ownership of addresses, sharing between processes. One
// test for each guarantee. Exits with 77 without a GPU. alarm() ends a test that hangs.
#include <spawn.h>
#include <sys/wait.h>

#include <optional>
#include <string_view>
#include <thread>

#include "on_gpu.h"

extern char** environ;

namespace {

using namespace cgx;
using namespace cgx::test;

constexpr char kOpen[] = "--open";  // this program as the other process of test_two_processes

// ---- Memory ----

void test_allocate() {
  for (size_t bytes : {size_t{0}, size_t{1}, kBytes, size_t{2} << 20}) {
    {  // freed memory is often allocated again at the same address
      const Memory host = pinned(bytes), device = on_device(bytes);
      const auto queue = gpu().make_queue();
      fill(host, 1, bytes);
      queue->copy(device.get(), host.get(), bytes);
      queue->synchronize();
    }
    const Memory host = pinned(bytes), device = on_device(bytes);
    CHECK(host && device, "%zu bytes", bytes);
    const Memory seen = fetch(device.get(), bytes);
    for (size_t i = 0; i < bytes; ++i)
      CHECK(host.get()[i] == std::byte{0} && seen.get()[i] == std::byte{0}, "byte %zu", i);
  }
  fails(CGX_SYSTEM, {"cudaMalloc of 1024.0 TiB on cuda:0 (", " free)", "cudaErrorMemoryAllocation"},
        [] { on_device(size_t{1} << 50); });
  fails(CGX_SYSTEM, {"cudaHostAlloc of 1024.0 TiB"}, [] { pinned(size_t{1} << 50); });
  CHECK(on_device(), "allocation fails after an earlier failure");
}

void test_addresses() {
  const Memory device = on_device(), host = pinned();
  float value = 0;
  CHECK(&device_of(device.get() + 100) == &gpu() && gpu().name() == "cuda:0", "wrong device");
  CHECK(&device_of(nullptr) == &gpu(), "a null address: the thread's current device");
  gpu().check_address(device.get() + kBytes - 1, {"input"});
  fails(CGX_INVALID_ARGUMENT, {"input is a null"}, [] { gpu().check_address(nullptr, {"input"}); });
  fails(CGX_INVALID_ARGUMENT, {"input is in pinned host memory"},
        [&] { gpu().check_address(host.get(), {"input"}); });
  fails(CGX_INVALID_ARGUMENT, {"output (address 0x", "in host memory"},
        [&] { gpu().check_address(&value, {"output"}); });
  void* freed = nullptr;
  check_cuda(cudaMalloc(&freed, kBytes));
  check_cuda(cudaFree(freed));
  fails(CGX_INVALID_ARGUMENT, {"has been freed"}, [&] { device_of(freed); });
}

// A thread that has not used CUDA still has no current context after a call. Calls within
// make_current() use its context and leave it current.
void test_caller_keeps_its_device() {
  PFN_cuCtxGetCurrent_v4000 get_current = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check_cuda(cudaGetDriverEntryPointByVersion(
      "cuCtxGetCurrent", reinterpret_cast<void**>(&get_current), 4000, cudaEnableDefault, &found));
  std::thread([&] {
    CUcontext context = nullptr;
    CHECK(get_current(&context) == CUDA_SUCCESS && !context, "a new thread has a context");
    Memory memory = on_device();
    device_of(memory.get());
    const auto queue = gpu().make_queue();
    queue->clear(memory.get(), kBytes);
    queue->synchronize();
    memory.reset();
    fails(CGX_INVALID_ARGUMENT, {}, [&] { device_of(&context); });
    CHECK(get_current(&context) == CUDA_SUCCESS && !context, "the call left a current context");
    auto current = gpu().make_current();
    gpu().make_queue()->synchronize();
    CHECK(get_current(&context) == CUDA_SUCCESS && context == gpu().context(),
          "a call within make_current() changed the context");
    current.reset();
    CHECK(get_current(&context) == CUDA_SUCCESS && !context, "make_current() left a context");
  }).join();
}

void test_other_device() {
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count));
  if (count < 2) {
    std::puts("one GPU: the tests for two GPUs were skipped");
    return;
  }
  CudaDevice& other = CudaDevice::get(1);
  const Memory theirs = other.allocate(kBytes, Place::kDevice), from = pinned();
  int current = -1;
  check_cuda(cudaGetDevice(&current));
  CHECK(current == 0, "the caller's device is now %d", current);
  CHECK(&device_of(theirs.get()) == &other, "wrong device");
  fails(CGX_INVALID_ARGUMENT,
        {"input is on cuda:1, but other buffers of this call or communicator are on cuda:0"},
        [&] { gpu().check_address(theirs.get(), {"input"}); });
  fill(from, 11);
  std::optional<Memory> opened;
  try {
    opened = gpu().open(other.share(theirs));
  } catch (const Error& error) {
    std::printf("skipped: %s\n", error.what());
    return;
  }
  const auto ours = gpu().make_current(), inner = other.make_current();
  const auto queue = gpu().make_queue();  // makes the first device current again
  queue->copy(opened->get(), from.get(), kBytes);
  queue->synchronize();
  check_filled(fetch(theirs.get()), 11);
}

// ---- Sharing ----

void test_share_in_one_process() {
  const Memory memory = on_device();
  const Bytes shared = gpu().share(memory);
  CHECK(shared.size() <= 128, "%zu bytes", shared.size());
  const Memory opened = gpu().open(shared);
  CHECK(opened == memory, "a different address");
}

std::string to_hex(const Bytes& bytes) {
  std::string text;
  for (const std::byte byte : bytes) {
    char two[3];
    std::snprintf(two, sizeof(two), "%02x", static_cast<unsigned int>(byte));
    text += two;
  }
  return text;
}

Bytes from_hex(std::string_view text) {
  Bytes bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2)
    bytes.push_back(static_cast<std::byte>(std::stoi(std::string(text.substr(i, 2)), nullptr, 16)));
  return bytes;
}

// The second process: reads the bytes of the first, and writes its answer to the same memory.
int open_and_answer(std::string_view shared) {
  const Memory memory = gpu().open(from_hex(shared)), answer = pinned();
  check_filled(fetch(memory.get()), 12);
  fill(answer, 13);
  const auto queue = gpu().make_queue();
  queue->copy(memory.get(), answer.get(), kBytes);
  queue->synchronize();
  return 0;
}

void test_two_processes(char* program) {
  const Memory memory = on_device(), from = pinned();
  fill(from, 12);
  const auto queue = gpu().make_queue();
  queue->copy(memory.get(), from.get(), kBytes);
  queue->synchronize();
  std::string shared = to_hex(gpu().share(memory)), flag = kOpen;
  char* arguments[] = {program, flag.data(), shared.data(), nullptr};
  pid_t child = 0;
  int status = -1;
  CHECK(posix_spawn(&child, program, nullptr, nullptr, arguments, environ) == 0,
        "posix_spawn failed");
  CHECK(waitpid(child, &status, 0) == child && status == 0, "exit status of the second process: %d",
        status);
  check_filled(fetch(memory.get()), 13);
}

}  // namespace

int main(int count, char** arguments) {
  begin();
  if (count == 3 && std::string_view(arguments[1]) == kOpen) return open_and_answer(arguments[2]);
  test_allocate();
  test_addresses();
  test_caller_keeps_its_device();
  test_other_device();
  test_share_in_one_process();
  test_two_processes(arguments[0]);
}
