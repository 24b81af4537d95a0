// The torch.distributed backend "cgx": allreduce goes to the core, everything else to an inner
// backend of torch (gloo for CPU tensors, NCCL for CUDA tensors).
//
//   - allreduce of one dense tensor, or of a list, of float32, float16 or bfloat16, with sum, avg,
//     min, max or product: the core, compressed where backend_rule.h says so, else exact. CPU
//     tensors, and CUDA tensors if the core has CUDA; these as NCCL does it: a call with
//     async_op=False is put on the current stream, all others on a stream of the group's own
//   - all other calls: the inner backend of the tensors' device, shown to profilers as "cgx:...".
//     Averages of CPU tensors are gloo's sums, divided (joint_work.h)
//
// The inner backends and the communicator are made in Python
// (cgx_ops/torch/backend/process_group.py): torch does not ship what it takes to make a gloo
// backend in C++.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "backend_rule.h"

namespace cgx::torch_ops {

// What a backend wants of Python (backend_module.cc).
bool debug_wanted();                                   // whether debug lines are
void debug(const std::string& line);                   // one line per decision
void warn(const std::string& line);                    // at most once per process
void without_lock(const std::function<void()>& work);  // runs it without the GIL

class Backend final : public c10d::Backend {
 public:
  struct Options : c10d::Backend::Options {
    Options(std::shared_ptr<const Compression> compression, Automatic automatic,
            std::chrono::milliseconds timeout)
        : c10d::Backend::Options("cgx", timeout),
          compression(std::move(compression)),
          automatic(automatic) {}
    // Virtual from torch 2.14 on: groups that are split off get a copy.
    c10::intrusive_ptr<c10d::Backend::Options> clone() const {
      return c10::make_intrusive<Options>(*this);
    }
    std::shared_ptr<const Compression> compression;
    Automatic automatic;
  };
  using Milliseconds = std::chrono::milliseconds;
  using WorkRef = c10::intrusive_ptr<c10d::Work>;
  using BackendRef = c10::intrusive_ptr<c10d::Backend>;
  using OptionsRef = c10::intrusive_ptr<c10d::Backend::Options>;
  using Inner = std::map<c10::DeviceType, BackendRef>;
  using Tensors = std::vector<at::Tensor>;
  // Makes the backend of another group, whose name is in the options: (store, rank, size, options).
  using MakeBackend = std::function<BackendRef(c10::intrusive_ptr<c10d::Store>, int, int,
                                               c10::intrusive_ptr<Options>)>;

  // `comm` is the cgx communicator of the group; the backend closes it. `cuda`: whether the core
  // reduces CUDA tensors.
  Backend(int rank, int size, int32_t comm, Inner inner, bool cuda,
          c10::intrusive_ptr<Options> options, MakeBackend make_backend);
  ~Backend() override;

  const std::string getBackendName() const override { return "cgx"; }
  OptionsRef getBackendOptions() override { return options_; }
  void setTimeout(Milliseconds timeout) override;
  bool supportsSplitting() const override { return true; }
  BackendRef split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                   const OptionsRef& options) override;
  BackendRef merge(const c10::intrusive_ptr<c10d::Store>& store, const OptionsRef& options,
                   const int& rank, const int& size) override;
  void eagerConnectSingleDevice(at::Device device) override;

  // Collectives started between the two have one Work. Point-to-point calls keep their own:
  // supportsCoalescing() stays false, as gloo's is.
  void startCoalescing() override;
  WorkRef endCoalescing() override;

  WorkRef allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkRef allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override;

  WorkRef allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkRef broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkRef reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkRef allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override;
  WorkRef _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override;
  WorkRef allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkRef allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkRef gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override;
  WorkRef scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override;
  WorkRef reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkRef _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkRef reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkRef alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override;
  WorkRef alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override;
  WorkRef send(Tensors& tensors, int to, int tag) override;
  WorkRef recv(Tensors& tensors, int from, int tag) override;
  WorkRef recvAnysource(Tensors& tensors, int tag) override;
  WorkRef barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  void setSequenceNumberForGroup() override;
  // The collectives called so far; equal on all ranks that are at the same place.
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void enableCollectivesTiming() override;
  c10d::ErrorType getError() override;
  // Both end the communicator: what is in flight fails, what has ended is delivered to peers.
  void abort() override;
  void shutdown() override;

  int32_t communicator() const { return comm_; }

 private:
  // The inner backend for a device. Throws if there is none.
  c10d::Backend& inner(at::Device device) const;
  // The core's name of an operation; none if the core does not reduce such tensors with it.
  std::optional<cgx_op_t> served(at::TensorList tensors, const c10d::ReduceOp& op) const;
  WorkRef reduce_in_core(at::TensorList tensors, cgx_op_t op, const c10d::AllreduceOptions& options,
                         c10d::OpType type);
  Decision decide_and_tell(cgx_op_t op, at::TensorList tensors, int64_t numel);
  // Calls a method of the inner backend of the device of `shown`, with the call shown to profilers.
  template <typename Method, typename... Arguments>
  WorkRef forward(const char* title, at::TensorList shown, Method method, Arguments&&... arguments);
  // The same of a reduction to `results`, and its averages where the inner backend has none.
  template <typename Method, typename OpOptions, typename... Arguments>
  WorkRef forward_reduction(const char* title, at::TensorList shown, Method method,
                            at::TensorList results, const OpOptions& options,
                            Arguments&... arguments);
  template <typename Start>
  WorkRef naming_losses(const char* title, at::Device device, Start&& start);
  // The same as forward, but that coalescing does not see the work.
  template <typename Method, typename... Arguments>
  WorkRef start_inner(const char* title, at::TensorList shown, Method method,
                      Arguments&&... arguments);
  // Notes the work of a call between startCoalescing and endCoalescing.
  WorkRef coalesced(WorkRef work);
  BackendRef related(const c10::intrusive_ptr<c10d::Store>& store, const OptionsRef& options,
                     int rank, int size);
  void close_communicator();

  const int32_t comm_;
  const std::string name_;  // of the communicator
  Inner inner_;
  const bool cuda_;
  const c10::intrusive_ptr<Options> options_;
  const MakeBackend make_backend_;
  c10::intrusive_ptr<c10d::Store> related_store_;  // of the group made last by split or merge
  c10::weak_intrusive_ptr<c10d::Backend> related_{c10::intrusive_ptr<c10d::Backend>()};
  std::atomic<uint64_t> sequence_{0};
  std::atomic<int64_t> draws_{0};  // seeds given to calls that round at random
  std::atomic<bool> closed_{false};
  std::mutex coalescing_mutex_;
  std::optional<std::vector<WorkRef>> coalescing_;  // set between startCoalescing and the end
};

}  // namespace cgx::torch_ops
