// The calls of torch.distributed: those that the core supports go there (backend_allreduce.cc,
// backend_all_to_all.cc, backend_transfer.cc), and all others to the inner backend of the tensors'
// device. Both are recorded for profilers.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include <algorithm>
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

using Tensors = Backend::Tensors;

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

// Whether a call may pass the tensor on. Most calls of gloo ignore strides and treat a tensor as
// contiguous memory.
bool usable(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided) return true;
  return tensor.is_contiguous() && !tensor.is_neg();
}

// The inputs to pass on: contiguous copies of those that gloo cannot use.
Tensors contiguous(const Tensors& tensors) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  Tensors used;
  for (const at::Tensor& tensor : tensors) {
    used.push_back(usable(tensor) ? tensor : tensor.resolve_neg().contiguous());
  }
  return used;
}

std::vector<Tensors> contiguous(const std::vector<Tensors>& lists) {
  std::vector<Tensors> used;
  for (const Tensors& tensors : lists) used.push_back(contiguous(tensors));
  return used;
}

// The tensors that a call writes to. Throws if elements of one share memory.
struct Written {
  explicit Written(const Tensors& tensors) : given(tensors) {
    for (const at::Tensor& tensor : given) {
      if (!usable(tensor)) at::assert_no_internal_overlap(tensor);
    }
    used = contiguous(given);
  }
  // Returns the work of a call that writes to `used`, which then writes to `given`.
  Backend::WorkRef back(Backend::WorkRef work) const {
    if (std::all_of(given.begin(), given.end(), usable)) return work;
    return copied_back(std::move(work), used, given);
  }
  const Tensors given;
  Tensors used;
};

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
Backend::WorkRef Backend::start_reduction(const char* title, at::TensorList shown, Method method,
                                          at::TensorList results, const OpOptions& options,
                                          Arguments&... arguments) {
  const bool averages = options.reduceOp.op_ == c10d::ReduceOp::AVG;
  if (!averages || !device_of(shown).is_cpu())  // NCCL has averages
    return start_inner(title, shown, method, arguments..., options);
  if (!shown.empty() && shown[0].scalar_type() == at::kBool) {
    C10_THROW_ERROR(TypeError,
                    "the backend cgx does not average bool tensors (NCCL does not either): average "
                    "x.float(), or reduce with MAX (any) or MIN (all)");
  }
  OpOptions of_sum = options;
  of_sum.reduceOp = c10d::ReduceOp::SUM;
  WorkRef sum = start_inner(title, shown, method, arguments..., of_sum);
  return averaged(std::move(sum), results.vec(), size_);
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
  Written xs(tensors);
  return coalesced(xs.back(start_reduction("cgx:all_reduce", xs.used, &c10d::Backend::allreduce,
                                           xs.used, options, xs.used)));
}

Backend::WorkRef Backend::allreduce_coalesced(Tensors& tensors,
                                              const c10d::AllreduceCoalescedOptions& options) {
  if (const auto op = served(tensors, options.reduceOp); op && !tensors.empty()) {
    return reduce_in_core(tensors, *op, options, c10d::OpType::ALLREDUCE_COALESCED);
  }
  return coalesced(start_reduction("cgx:all_reduce", tensors, &c10d::Backend::allreduce_coalesced,
                                   tensors, options, tensors));
}

Backend::WorkRef Backend::allreduce_sparse(Tensors& tensors,
                                           const c10d::AllreduceOptions& options) {
  return forward("cgx:sparse_all_reduce", tensors, &c10d::Backend::allreduce_sparse, tensors,
                 options);
}

Backend::WorkRef Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  Written xs(tensors);
  return coalesced(
      xs.back(start_inner("cgx:broadcast", xs.used, &c10d::Backend::broadcast, xs.used, options)));
}

Backend::WorkRef Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  Written xs(tensors);
  // Tensors of other ranks are unspecified after a reduce.
  const Tensors results = options.rootRank == rank_ ? xs.used : Tensors{};
  return coalesced(xs.back(
      start_reduction("cgx:reduce", xs.used, &c10d::Backend::reduce, results, options, xs.used)));
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
  Tensors used = contiguous(inputs);
  return forward("cgx:gather", used, &c10d::Backend::gather, outputs, used, options);
}

Backend::WorkRef Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                  const c10d::ScatterOptions& options) {
  Written ys(outputs);
  std::vector<Tensors> xs = contiguous(inputs);
  const Tensors shown = xs.empty() ? ys.used : xs[0];  // only the root has inputs
  return coalesced(
      ys.back(start_inner("cgx:scatter", shown, &c10d::Backend::scatter, ys.used, xs, options)));
}

Backend::WorkRef Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  Written ys(outputs);
  std::vector<Tensors> xs = contiguous(inputs);
  const Tensors shown = xs.empty() ? ys.used : xs[0];
  return coalesced(ys.back(start_reduction(
      "cgx:reduce_scatter", shown, &c10d::Backend::reduce_scatter, ys.used, options, ys.used, xs)));
}

Backend::WorkRef Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  if (size_ > 1 && input.is_floating_point()) report_exact_reduce_scatter(rank_, size_);
  at::Tensor x = contiguous(Tensors{input})[0];
  return coalesced(start_reduction("cgx:reduce_scatter", x, &c10d::Backend::_reduce_scatter_base,
                                   output, options, output, x));
}

Backend::WorkRef Backend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  Tensors xs = contiguous(inputs);
  return coalesced(start_reduction("cgx:reduce_scatter", xs,
                                   &c10d::Backend::reduce_scatter_tensor_coalesced, outputs,
                                   options, outputs, xs));
}

Backend::WorkRef Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                        std::vector<int64_t>& output_sizes,
                                        std::vector<int64_t>& input_sizes,
                                        const c10d::AllToAllOptions& options) {
  if (exchanged_in_core(output, input))
    return exchange_in_core(output, input, output_sizes, input_sizes, options);
  Written y({output});
  at::Tensor x = contiguous(Tensors{input})[0];
  return coalesced(y.back(start_inner("cgx:all_to_all", x, &c10d::Backend::alltoall_base, y.used[0],
                                      x, output_sizes, input_sizes, options)));
}

Backend::WorkRef Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                   const c10d::AllToAllOptions& options) {
  Written ys(outputs);
  Tensors xs = contiguous(inputs);
  return coalesced(
      ys.back(start_inner("cgx:all_to_all", xs, &c10d::Backend::alltoall, ys.used, xs, options)));
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
