// The calls of torch.distributed: those that the core supports go there (backend_allreduce.cc,
// backend_all_to_all.cc, backend_transfer.cc), and all others to the inner backend of the tensors'
// device. Both are recorded for profilers.
#include <ATen/record_function.h>

#include <memory>
#include <type_traits>
#include <utility>

#include "backend.h"
#include "core.h"
#include "joint_work.h"
#include "kernels.h"
#include "named_work.h"

namespace cgx::torch_ops {
namespace {

// Records a call for profilers until its work ends or, if the work has no future, until it has
// started.
class ProfiledCall {
 public:
  ProfiledCall(const char* title, at::TensorList tensors) {
    if (!at::hasCallbacks()) return;
    record_ = std::make_shared<at::RecordFunction>(at::RecordScope::USER_SCOPE);
    if (!record_->isActive()) return;
    record_->_setAsync();  // may end on another thread
    const std::vector<c10::IValue> values(tensors.begin(), tensors.end());
    record_->before(title, &values);
  }
  void until(const Backend::WorkRef& work) {
    if (!record_ || !record_->isActive() || !work) return;
    try {
      work->getFuture()->addCallback([record = record_](auto& /*future*/) { record->end(); });
    } catch (const c10::Error&) {  // sends and receives have no future
      record_->end();
    }
  }

 private:
  std::shared_ptr<at::RecordFunction> record_;
};

// For calls in which gloo treats a tensor as contiguous memory.
void require_dense(const char* call, at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_cpu() || tensor.layout() != at::kStrided) continue;
    if (tensor.is_non_overlapping_and_dense()) continue;
    C10_THROW_ERROR(ValueError,
                    c10::str("the backend cgx: ", call, " of a tensor of shape ", tensor.sizes(),
                             " and strides ", tensor.strides(),
                             ", which is not dense in memory: pass tensor.contiguous()"));
  }
}

// Let gloo report empty lists of tensors.
at::Device device_of(at::TensorList tensors) {
  return tensors.empty() ? at::Device(at::kCPU) : tensors[0].device();
}

}  // namespace

// ---- forwarding to an inner backend ------------------------------------------------------------

Backend::BackendRef Backend::inner(at::Device device) const {
  (void)communicator();
  const std::lock_guard<std::mutex> lock(members_mutex_);
  const auto found = inner_.find(device.type());
  if (found != inner_.end()) return found->second;
  if (closed_) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("cgx, group '", name_,
                             "': it was aborted or destroyed on this rank: create a new group"));
  }
  C10_THROW_ERROR(
      NotImplementedError,
      c10::str("the backend cgx cannot move tensors on ", device, " here",
               device.is_cuda() ? ": this torch was built without NCCL; move the tensor to the CPU"
                                : ""));
}

template <typename Method, typename... Arguments>
Backend::WorkRef Backend::forward(const char* title, at::TensorList shown, Method method,
                                  Arguments&&... arguments) {
  return coalesced(start_inner(title, shown, method, std::forward<Arguments>(arguments)...));
}

template <typename Method, typename OpOptions, typename... Arguments>
Backend::WorkRef Backend::forward_reduction(const char* title, at::TensorList shown, Method method,
                                            at::TensorList results, const OpOptions& options,
                                            Arguments&... arguments) {
  const bool averages = options.reduceOp.op_ == c10d::ReduceOp::AVG;
  if (!averages || !device_of(shown).is_cpu())  // NCCL has averages
    return forward(title, shown, method, arguments..., options);
  if (!shown.empty() && shown[0].scalar_type() == at::kBool) {
    C10_THROW_ERROR(TypeError,
                    "the backend cgx does not average bool tensors (NCCL does not either): average "
                    "x.float(), or reduce with MAX (any) or MIN (all)");
  }
  OpOptions of_sum = options;
  of_sum.reduceOp = c10d::ReduceOp::SUM;
  WorkRef sum = start_inner(title, shown, method, arguments..., of_sum);
  return coalesced(averaged(std::move(sum), results.vec(), size_));
}

// Starts a work of an inner backend and lets its errors name lost ranks. Not for NCCL, which
// reports them itself.
template <typename Start>
Backend::WorkRef Backend::naming_losses(const char* title, at::Device device, Start&& start) {
  if (!device.is_cpu()) return start();
  const LossFinder finder(communicator(), title);
  try {
    return with_named_failures(
        start(), [finder](std::exception_ptr failure) { return finder.named(std::move(failure)); });
  } catch (...) {  // sends may fail here
    std::rethrow_exception(finder.named(std::current_exception()));
  }
}

template <typename Method, typename... Arguments>
Backend::WorkRef Backend::start_inner(const char* title, at::TensorList shown, Method method,
                                      Arguments&&... arguments) {
  ProfiledCall call(title, shown);
  const at::Device device = device_of(shown);
  const BackendRef backend = inner(device);
  WorkRef work = naming_losses(
      title, device, [&] { return (*backend.*method)(std::forward<Arguments>(arguments)...); });
  call.until(work);
  // Point-to-point calls are not collective, so they do not count. recv has the type of send.
  if constexpr (!std::is_same_v<Method, decltype(&c10d::Backend::send)> &&
                !std::is_same_v<Method, decltype(&c10d::Backend::recvAnysource)>) {
    ++sequence_;
  }
  return work;
}

// ---- the calls ---------------------------------------------------------------------------------

Backend::WorkRef Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (const auto op = served(tensors, options.reduceOp); op && tensors.size() == 1) {
    return reduce_in_core(tensors, *op, options, c10d::OpType::ALLREDUCE);
  }
  require_dense("all_reduce", tensors);
  return forward_reduction("cgx:all_reduce", tensors, &c10d::Backend::allreduce, tensors, options,
                           tensors);
}

Backend::WorkRef Backend::allreduce_coalesced(Tensors& tensors,
                                              const c10d::AllreduceCoalescedOptions& options) {
  if (const auto op = served(tensors, options.reduceOp); op && !tensors.empty()) {
    return reduce_in_core(tensors, *op, options, c10d::OpType::ALLREDUCE_COALESCED);
  }
  return forward_reduction("cgx:all_reduce", tensors, &c10d::Backend::allreduce_coalesced, tensors,
                           options, tensors);
}

Backend::WorkRef Backend::allreduce_sparse(Tensors& tensors,
                                           const c10d::AllreduceOptions& options) {
  return forward("cgx:sparse_all_reduce", tensors, &c10d::Backend::allreduce_sparse, tensors,
                 options);
}

Backend::WorkRef Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  require_dense("broadcast", tensors);
  return forward("cgx:broadcast", tensors, &c10d::Backend::broadcast, tensors, options);
}

Backend::WorkRef Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  require_dense("reduce", tensors);
  // Tensors of other ranks are unspecified after a reduce.
  const Tensors results = options.rootRank == rank_ ? tensors : Tensors{};
  return forward_reduction("cgx:reduce", tensors, &c10d::Backend::reduce, results, options,
                           tensors);
}

Backend::WorkRef Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& options) {
  return forward("cgx:all_gather", inputs, &c10d::Backend::allgather, outputs, inputs, options);
}

Backend::WorkRef Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  return forward("cgx:all_gather", input, &c10d::Backend::_allgather_base, output, input, options);
}

Backend::WorkRef Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  return forward("cgx:all_gather", inputs, &c10d::Backend::allgather_coalesced, outputs, inputs,
                 options);
}

Backend::WorkRef Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  return forward("cgx:all_gather", inputs, &c10d::Backend::allgather_into_tensor_coalesced, outputs,
                 inputs, options);
}

Backend::WorkRef Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::GatherOptions& options) {
  return forward("cgx:gather", inputs, &c10d::Backend::gather, outputs, inputs, options);
}

Backend::WorkRef Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                  const c10d::ScatterOptions& options) {
  // Only the root has inputs.
  const Tensors shown = inputs.empty() ? outputs : inputs[0];
  require_dense("scatter", outputs);
  require_dense("scatter", shown);
  return forward("cgx:scatter", shown, &c10d::Backend::scatter, outputs, inputs, options);
}

Backend::WorkRef Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  const Tensors shown = inputs.empty() ? outputs : inputs[0];
  require_dense("reduce_scatter", outputs);
  require_dense("reduce_scatter", shown);
  return forward_reduction("cgx:reduce_scatter", shown, &c10d::Backend::reduce_scatter, outputs,
                           options, outputs, inputs);
}

Backend::WorkRef Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  if (size_ > 1 && input.is_floating_point()) report_exact_reduce_scatter(rank_, size_);
  return forward_reduction("cgx:reduce_scatter", input, &c10d::Backend::_reduce_scatter_base,
                           output, options, output, input);
}

Backend::WorkRef Backend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return forward_reduction("cgx:reduce_scatter", inputs,
                           &c10d::Backend::reduce_scatter_tensor_coalesced, outputs, options,
                           outputs, inputs);
}

Backend::WorkRef Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                        std::vector<int64_t>& output_sizes,
                                        std::vector<int64_t>& input_sizes,
                                        const c10d::AllToAllOptions& options) {
  if (exchanged_in_core(output, input))
    return exchange_in_core(output, input, output_sizes, input_sizes, options);
  require_dense("all_to_all", {output, input});
  return forward("cgx:all_to_all", input, &c10d::Backend::alltoall_base, output, input,
                 output_sizes, input_sizes, options);
}

Backend::WorkRef Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                   const c10d::AllToAllOptions& options) {
  require_dense("all_to_all", outputs);
  require_dense("all_to_all", inputs);
  return forward("cgx:all_to_all", inputs, &c10d::Backend::alltoall, outputs, inputs, options);
}

Backend::WorkRef Backend::send(Tensors& tensors, int to, int tag) {
  return transfer(tensors, {rank_, to, tag}, [&] {
    return start_inner("cgx:send", tensors, &c10d::Backend::send, tensors, to, tag);
  });
}

Backend::WorkRef Backend::recv(Tensors& tensors, int from, int tag) {
  return transfer(tensors, {from, rank_, tag}, [&] {
    return start_inner("cgx:recv", tensors, &c10d::Backend::recv, tensors, from, tag);
  });
}

Backend::WorkRef Backend::recvAnysource(Tensors& tensors, int tag) {
  return receive_from_any(tensors, tag, [&] {
    return start_inner("cgx:recvAnySource", tensors, &c10d::Backend::recvAnysource, tensors, tag);
  });
}

Backend::WorkRef Backend::barrier(const c10d::BarrierOptions& options) {
  ProfiledCall call("cgx:barrier", {});
  ++sequence_;
  const at::Device device = options.device.value_or(at::Device(at::kCPU));
  WorkRef work =
      naming_losses("cgx:barrier", device, [&] { return inner(device)->barrier(options); });
  call.until(work);
  return coalesced(std::move(work));
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  ++sequence_;
  inner(at::kCPU)->monitoredBarrier(options, wait_all_ranks);
}

}  // namespace cgx::torch_ops
