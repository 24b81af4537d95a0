// A GPU as a Device.
//
// A device starts on first use, not when libcgx.so is loaded, and lives as long as the process,
// because CUDA ends before static objects are destroyed. It uses the primary context, which
// frameworks and their CUDA runtimes share.
#pragma once

#include "cuda/queue.h"

namespace cgx::device::cuda {

class CudaDevice : public Device {
 public:
  // Starts the device if necessary. Throws Error(CGX_SYSTEM) if it does not exist, and
  // Error(CGX_UNSUPPORTED) if it is older than the kernels support.
  static CudaDevice& get(int ordinal);

  const std::string& name() const override { return name_; }
  std::unique_ptr<Queue> make_queue() override;
  std::unique_ptr<Event> make_event() override;
  std::unique_ptr<Queue> wrap(void* stream) override;
  bool recording(void* stream) override;
  void synchronize() override;
  Memory allocate(size_t bytes, Place place) override;
  Bytes share(const Memory& memory) override;
  Memory open(const Bytes& shared) override;
  std::unique_ptr<Fabric> make_fabric() override;
  bool reached_by_mpi() override;
  std::shared_ptr<void> make_current() override;
  void flush_remote_writes() override;
  void check_address(const void* address, const BufferName& what) override;

  int ordinal() const { return ordinal_; }
  const cudaUUID_t& uuid() const { return uuid_; }
  CUcontext context() const { return context_; }
  int processors() const { return processors_; }  // number of multiprocessors

  // Runs `work`, which frees something, in a destructor or deleter. It may run after CUDA has
  // ended, which has freed everything then.
  template <typename Work>
  void release(Work work) const noexcept {
    try {
      const Current current(context_);
      work();
      cudaGetLastError();
    } catch (const Error&) {
    }
  }

 private:
  explicit CudaDevice(int ordinal);
  Memory allocate_device(size_t bytes);
  Memory allocate_pinned(size_t bytes);

  const int ordinal_;
  const std::string name_;
  int processors_ = 0;
  bool flushes_remote_writes_ = false;
  CUcontext context_ = nullptr;
  cudaUUID_t uuid_{};
};

}  // namespace cgx::device::cuda
