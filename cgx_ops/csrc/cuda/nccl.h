// NCCL as a Fabric. Uses the library that the framework has loaded, looked up on first use, with
// our own declarations.
//
// Communicators are non-blocking, so that no call waits for peers without a deadline.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "cuda/device.h"
#include "device/fabric.h"

namespace cgx::device::cuda {

class Nccl {
 public:
  // Throws Error(CGX_SYSTEM) if NCCL is not found or too old.
  static const Nccl& find();

  std::string version() const;
  Bytes make_id() const;

 private:
  friend class NcclFabric;
  struct Functions;
  Nccl();
  void check(int result, const char* call) const;

  std::unique_ptr<const Functions> call_;
  int version_ = 0;
};

// An NCCL communicator.
class NcclFabric final : public Fabric {
 public:
  NcclFabric(const Nccl& nccl, const CudaDevice& device) : nccl_(nccl), device_(device) {}
  ~NcclFabric() override { abort(); }
  NcclFabric(const NcclFabric&) = delete;
  NcclFabric& operator=(const NcclFabric&) = delete;

  Bytes make_id() override { return nccl_.make_id(); }
  void connect(int rank, int size, const Bytes& id, Seconds timeout) override;
  // Waits for peers when two ranks exchange messages for the first time, because connecting takes
  // both.
  void exchange(std::span<const Message> outgoing, std::span<const Message> incoming, Queue& queue,
                Seconds timeout) override;
  void check() override;
  void abort() override;
  void close(Seconds timeout) override;

 private:
  using Lock = std::unique_lock<std::mutex>;
  // Waits until a started operation has ended. Releases the lock while it sleeps.
  void settle(Lock& lock, int result, const char* call, Seconds timeout);
  void require_open() const;

  const Nccl& nccl_;
  const CudaDevice& device_;
  std::mutex mutex_;        // NCCL's functions are not thread-safe
  void* handle_ = nullptr;  // an ncclComm_t
};

}  // namespace cgx::device::cuda
