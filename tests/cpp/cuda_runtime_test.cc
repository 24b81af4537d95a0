// The CUDA code without a driver or a GPU: it loads, and every entry point reports what is missing.
// Also tests the parts that need no device. With a GPU the same calls fail for other reasons;
// cuda_device*_test.cc tests them.
#include <functional>

#include "cuda/device.h"
#include "cuda/nccl.h"
#include "cuda/sharing.h"
#include "throwing.h"
#include "transport/host.h"

namespace {

using namespace cgx;
using namespace cgx::device;

bool has_driver() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess && version != 0;
}

// Without a driver, cudaGetLastError always returns an error.
bool no_cuda_error() { return !has_driver() || cudaGetLastError() == cudaSuccess; }

// Like throws(), and checks that no CUDA error remains.
void fails(cgx_status_t status, const std::vector<std::string>& parts,
           const std::function<void()>& work) {
  throws(status, parts, work);
  CHECK(no_cuda_error(), "cudaGetLastError returns an error");
}

bool has_device() {
  int count = 0;
  const bool found = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  cudaGetLastError();
  return found;
}

void test_host_memory() {
  float value = 0;
  for (int round = 0; round < 2; ++round) {  // twice, since a failure must not be cached
    const auto ask = [&] { device_of(&value); };
    if (has_device())
      fails(CGX_INVALID_ARGUMENT, {"the first buffer", "host memory", "pass device=CPU"}, ask);
    else if (!has_driver())
      fails(CGX_SYSTEM, {"no NVIDIA driver", "pass device=CPU"}, ask);
    else
      fails(CGX_SYSTEM, {"looking for GPUs"}, ask);
  }
}

void test_no_device() {
  if (has_device()) return;
  fails(CGX_SYSTEM, {"cuda:0", has_driver() ? "" : "no NVIDIA driver"},
        [] { cuda::CudaDevice::get(0); });
  fails(CGX_SYSTEM, {"the current GPU"}, [] { device_of(nullptr); });
}

void test_describe() {
  const std::string text = describe_devices();
  CHECK(contains(text, "{\"built\": \"" + cuda::version_text(CUDART_VERSION) + "\""), "%s",
        text.c_str());
  CHECK(contains(text, "\"driver\": null") == !has_driver(), "%s", text.c_str());
  CHECK(contains(text, "\"devices\": []}") == !has_device(), "%s", text.c_str());
  CHECK(no_cuda_error(), "cudaGetLastError returns an error");
}

void test_texts() {
  CHECK(cuda::version_text(13020) == "13.2", "%s", cuda::version_text(13020).c_str());
  const std::pair<size_t, const char*> sizes[] = {{0, "0 bytes"},
                                                  {1023, "1023 bytes"},
                                                  {1024, "1.0 KiB"},
                                                  {size_t{64} << 20, "64.0 MiB"},
                                                  {size_t{141} << 30, "141.0 GiB"},
                                                  {size_t{3} << 49, "1536.0 TiB"}};
  for (const auto& [bytes, text] : sizes)
    CHECK(cuda::size_text(bytes) == text, "%zu: %s", bytes, cuda::size_text(bytes).c_str());
}

void test_errors() {
  cuda::check(cudaSuccess, "nothing");
  cuda::check(CUDA_SUCCESS, "nothing");
  fails(CGX_SYSTEM, {"a copy of 5 bytes: ", "(cudaErrorIllegalAddress). ", "restart the process"},
        [] { cuda::check(cudaErrorIllegalAddress, "a copy of ", 5, " bytes"); });
  // Driver and runtime use the same error numbers.
  fails(CGX_SYSTEM, {"(cudaErrorMemoryAllocation). "},
        [] { cuda::check(CUDA_ERROR_OUT_OF_MEMORY, "allocating"); });
  fails(CGX_SYSTEM, {"(cudaErrorNotSupported)"},
        [] { cuda::check(CUDA_ERROR_NOT_SUPPORTED, "waiting"); });
}

// The description of shared memory, as far as it works without a device: a peer reads it, and
// rejects it if it could not open the memory.
void test_shared() {
  cuda::Shared mine{};
  mine.pid = 4711;
  mine.address = 0x7f0000000000;
  mine.uuid.bytes[15] = 42;
  mine.handle.reserved[63] = 7;
  mine.memory = this_memory_number();
  const Bytes bytes = mine.bytes();
  CHECK(bytes.size() <= 128, "%zu bytes", bytes.size());
  const cuda::Shared theirs = cuda::Shared::read(bytes);
  CHECK(std::memcmp(&mine, &theirs, sizeof(mine)) == 0, "the description changed");

  Bytes shorter = bytes;
  shorter.pop_back();
  fails(CGX_SYSTEM, {"different versions"}, [&] { cuda::Shared::read(shorter); });
  ++mine.memory;
  fails(CGX_SYSTEM, {"process 4711", "another host", "--pid=host"},
        [&] { cuda::Shared::read(mine.bytes()); });
}

// Finding NCCL needs no device. The error names the missing file.
void test_nccl() {
  for (int round = 0; round < 2; ++round) try {  // twice, since a failure must not be cached
      const cuda::Nccl& nccl = cuda::Nccl::find();
      CHECK(nccl.version().starts_with("2."), "version %s", nccl.version().c_str());
      CHECK(nccl.make_id().size() == 128 && nccl.make_id() != nccl.make_id(), "ids are not unique");
    } catch (const Error& error) {
      CHECK(error.status() == CGX_SYSTEM && contains(error.what(), "libnccl.so.2"), "%s",
            error.what());
    }
}

}  // namespace

int main() {
  test_host_memory();
  test_no_device();
  test_describe();
  test_texts();
  test_errors();
  test_shared();
  test_nccl();
}
