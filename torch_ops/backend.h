// The torch.distributed backend "cgx". The core runs allreduce, all_to_all and compressed sends; an
// inner backend (gloo for CPU tensors, NCCL for CUDA tensors) runs all other collectives.
//
// - Allreduce of one dense tensor or a list, of float32, float16 or bfloat16, with sum, avg, min,
//   max or product: the core. Whether it is compressed is decided in backend_rule.h. CUDA tensors
//   need a core with CUDA. As with NCCL, a call with async_op=False runs on the current stream, and
//   all others on a stream of the group.
// - all_to_all_single of dense tensors of these dtypes: the core; compressed in compressed(), and
//   outside of it only for CPU tensors.
// - send and recv of such tensors in compressed(): the core (backend_transfer.cc).
// - All other calls: the inner backend of the tensors' device. Profilers show them as "cgx:...".
//   gloo does not average, so its sums are divided. It ignores strides, so it gets contiguous
//   copies of tensors of other layouts (joint_work.h).
//
// A group that was initialized with enable_reconfigure changes its members: backend_reconfigure.cc.
//
// Python makes the inner backends and the communicator (cgx_ops/torch/backend/process_group.py),
// because torch does not ship the headers to make a gloo backend in C++.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "backend_rule.h"
#include "cgx/call.h"

namespace cgx::torch_ops {

// Python services that the backend uses (backend_module.cc).
bool debug_wanted();                                   // whether debug logging is enabled
void debug(const std::string& line);                   // logs one line per decision
void warn(const std::string& line);                    // logs a warning, at most once per process
void without_lock(const std::function<void()>& work);  // runs `work` without the GIL

struct Announcement;  // of an exact message (backend_transfer.cc)

class Backend final : public c10d::Backend {
 public:
  struct Options : c10d::Backend::Options {
    Options(std::shared_ptr<const Compression> compression, Automatic automatic,
            std::chrono::milliseconds timeout)
        : c10d::Backend::Options("cgx", timeout),
          compression(std::move(compression)),
          automatic(automatic) {}
    // Virtual from torch 2.14 on. Groups that are split off get a copy.
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
  // Makes the backend of another group: (store, rank, size, options). The options hold its name.
  using MakeBackend = std::function<BackendRef(c10::intrusive_ptr<c10d::Store>, int, int,
                                               c10::intrusive_ptr<Options>)>;
  // The ranks of the group at one time, as seen by one of them.
  struct Members {
    int rank, size;
    int32_t comm;
    Inner inner;
  };
  // Connects the group's next members; made by Python (cgx_ops/torch/backend/make.py).
  struct Reconfigurations {
    using Handles = std::variant<std::unordered_set<std::string>, std::vector<std::string>>;
    using Disconnect = std::function<void(const std::string& reason)>;
    std::function<std::string()> handle;  // of this process, for the next reconfiguration
    std::function<Members(const Handles& handles, int64_t uuid, std::optional<Milliseconds> timeout,
                          Disconnect disconnect)>
        reconfigure;
  };

  // `comm` is the group's cgx communicator, which the backend closes. `cuda`: whether the core
  // supports CUDA tensors. `reconfigurations`: for a group that has no communicator (kNone) and
  // that only reconfigure() connects.
  static constexpr int32_t kNone = -1;
  Backend(int rank, int size, int32_t comm, Inner inner, bool cuda,
          c10::intrusive_ptr<Options> options, MakeBackend make_backend,
          std::optional<Reconfigurations> reconfigurations = std::nullopt);
  ~Backend() override;

#ifdef C10D_BACKEND_HAS_RECONFIGURE  // from torch 2.14 on
  bool supportsReconfigure() const override { return reconfigurations_.has_value(); }
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  // Ends the group's collectives with an error, here and on its other ranks, and connects the
  // processes with the given handles. Returns when they are connected.
  WorkRef reconfigure(const c10d::ReconfigureOptions& options) override;
#endif

  const std::string getBackendName() const override { return "cgx"; }
  OptionsRef getBackendOptions() override { return options_; }
  void setTimeout(Milliseconds timeout) override;
  bool supportsSplitting() const override { return true; }
  BackendRef split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                   const OptionsRef& options) override;
  BackendRef merge(const c10::intrusive_ptr<c10d::Store>& store, const OptionsRef& options,
                   const int& rank, const int& size) override;
  void eagerConnectSingleDevice(at::Device device) override;

  // Calls between startCoalescing and endCoalescing share one Work. torch puts the calls of
  // batch_isend_irecv there only if supportsCoalescing() is true. NCCL needs that: a send may wait
  // for its receive, so it must get those of CUDA tensors as one group. gloo does not.
  bool supportsCoalescing() const override { return inner().count(at::kCUDA) != 0; }
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
  // The number of collectives called so far, equal on all ranks at the same point of the program.
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void enableCollectivesTiming() override;
  c10d::ErrorType getError() override;
  // Both close the communicator: collectives in flight fail; finished ones are delivered to peers.
  // abort() waits for peers only for a moment, and ends their collectives, too. Both also drop the
  // inner backends, so that gloo closes its connections and peers do not wait for this rank.
  void abort() override;
  void shutdown() override;

  // Throws if the group is not connected.
  int32_t communicator() const;

 private:
  // Returns the inner backend of a device. Throws if there is none.
  BackendRef inner(at::Device device) const;
  Inner inner() const;
  // Returns the core's op for a call, or nullopt if the core does not support these tensors or this
  // op.
  std::optional<cgx_op_t> served(at::TensorList tensors, const c10d::ReduceOp& op) const;
  WorkRef reduce_in_core(at::TensorList tensors, cgx_op_t op, const c10d::AllreduceOptions& options,
                         c10d::OpType type);
  Decision decide_and_log(cgx_op_t op, at::TensorList tensors, int64_t numel);
  struct Message {
    int from, to, tag;
  };
  // Returns a call of the core without buffers and segments. `message`: that between two ranks,
  // which draws its own seeds; nullopt for a collective.
  CallBuilder core_call(cgx_verb_t verb, at::ScalarType dtype, const Decision& decision,
                        Milliseconds timeout, const std::optional<Message>& message = {});
  // all_to_all: whether the core serves it, how it sends the input, and the call.
  bool exchanged_in_core(const at::Tensor& output, const at::Tensor& input) const;
  Decision decision_of(const at::Tensor& input) const;
  WorkRef exchange_in_core(const at::Tensor& output, const at::Tensor& input,
                           const std::vector<int64_t>& output_sizes,
                           const std::vector<int64_t>& input_sizes,
                           const c10d::AllToAllOptions& options);
  // Sends or receives a message in the core or, if it is exact, by `start`.
  WorkRef transfer(const Tensors& tensors, const Message& message,
                   const std::function<WorkRef()>& start);
  WorkRef receive_from_any(const Tensors& tensors, int tag, const std::function<WorkRef()>& start);
  // Returns the core's call of a message, without buffers.
  CallBuilder transfer_call(const Message& message, at::ScalarType dtype, const Decision& decision);
  WorkRef transfer_in_core(const at::Tensor& tensor, const Message& message,
                           const Decision& decision);
  // Returns the status of cgx_start: not CGX_OK if the communicator is closed.
  cgx_status_t announce(const Message& message, std::shared_ptr<Announcement> announcement);
  // Calls a method of the inner backend of the device of `shown`, and records it for profilers.
  template <typename Method, typename... Arguments>
  WorkRef forward(const char* title, at::TensorList shown, Method method, Arguments&&... arguments);
  template <typename Start>
  WorkRef naming_losses(const char* title, at::Device device, Start&& start);
  // Like forward(), but does not add the work to a coalesced block.
  template <typename Method, typename... Arguments>
  WorkRef start_inner(const char* title, at::TensorList shown, Method method,
                      Arguments&&... arguments);
  // The same for a reduction to `results`. Computes averages if the inner backend cannot.
  template <typename Method, typename OpOptions, typename... Arguments>
  WorkRef start_reduction(const char* title, at::TensorList shown, Method method,
                          at::TensorList results, const OpOptions& options,
                          Arguments&... arguments);
  // Adds the work of a call between startCoalescing and endCoalescing to the block.
  WorkRef coalesced(WorkRef work);
  // Ends a block that an error left open, without its works.
  void leave_block();
  // Between startCoalescing and endCoalescing, lets the inner backend group the block's calls, too.
  void coalesce_inner(at::Device device);
  BackendRef related(const c10::intrusive_ptr<c10d::Store>& store, const OptionsRef& options,
                     int rank, int size);
  void close_communicator();
  // Aborts the communicator and the inner backends. Only reconfigure() connects an elastic group
  // again.
  void disconnect(const std::string& reason);
  // Calls abort() or shutdown() of inner backends and destroys them on another thread. `join`:
  // whether the destructor waits for it.
  void end(Inner old, void (c10d::Backend::*how)(), bool join);

  const std::string name_;            // the communicator's
  mutable std::mutex members_mutex_;  // held while the next two change together
  std::atomic<int32_t> comm_;
  Inner inner_;
  std::thread ending_;          // destroys the last inner backends
  std::atomic<int> aborts_{0};  // calls of abort()
  const bool cuda_;
  const c10::intrusive_ptr<Options> options_;
  const MakeBackend make_backend_;
  const std::optional<Reconfigurations> reconfigurations_;
  c10::intrusive_ptr<c10d::Store> related_store_;  // of the group that split or merge made last
  c10::weak_intrusive_ptr<c10d::Backend> related_{c10::intrusive_ptr<c10d::Backend>()};
  std::atomic<uint64_t> sequence_{0};
  std::mutex draws_mutex_;
  // Seeds that calls with random rounding used: by source, destination and tag modulo kCountedTags;
  // {} for collectives.
  std::map<std::array<int, 3>, int64_t> draws_;
  std::atomic<bool> closed_{false};
  std::mutex coalescing_mutex_;
  std::optional<std::vector<WorkRef>> coalescing_;  // set between startCoalescing and endCoalescing
  BackendRef coalescing_inner_;                     // the inner backend that groups calls, if any
};

}  // namespace cgx::torch_ops
