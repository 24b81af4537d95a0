#include "backend.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <algorithm>

#include "averages.h"
#include "coalesced.h"
#include "core.h"
#include "status.h"
#include "work.h"

namespace cgx::torch_ops {
namespace {

BackendHost host;

std::optional<cgx_op_t> core_op(const c10d::ReduceOp& op) {
  static const std::map<c10d::ReduceOp::RedOpType, cgx_op_t> kOps = {
      {c10d::ReduceOp::SUM, CGX_SUM},
      {c10d::ReduceOp::AVG, CGX_AVG},
      {c10d::ReduceOp::MIN, CGX_MIN},
      {c10d::ReduceOp::MAX, CGX_MAX},
      {c10d::ReduceOp::PRODUCT, CGX_PRODUCT}};
  const auto found = kOps.find(op.op_);
  if (found == kOps.end()) return std::nullopt;
  return found->second;
}

// The values can be read and written where they lie.
bool plain(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_neg(); }

// The tensors of a future's value: a list, or a list of lists.
void append_tensors(const c10::IValue& value, c10::List<at::Tensor>* tensors) {
  if (value.isTensor()) tensors->push_back(value.toTensor());
  if (!value.isList()) return;
  for (const c10::IValue& element : value.toListRef()) append_tensors(element, tensors);
}

// Several works as one.
class JointWork final : public c10d::Work {
 public:
  explicit JointWork(std::vector<Backend::WorkRef> works)
      : c10d::Work(/*rank=*/-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(),
                       [](auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](auto& work) { return work->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const auto& work : works_) {
      if (const std::exception_ptr failure = work->exception()) return failure;
    }
    return nullptr;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& work : works_) work->wait(timeout);
    return true;
  }
  void synchronize() override {
    for (const auto& work : works_) work->synchronize();
  }
  std::vector<at::Tensor> result() override {
    std::vector<at::Tensor> all;
    for (const auto& work : works_) {
      for (at::Tensor& tensor : work->result()) all.push_back(std::move(tensor));
    }
    return all;
  }
  // Of the list of all works' tensors.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    using Future = c10::intrusive_ptr<c10::ivalue::Future>;
    const auto tensors = c10::ListType::create(c10::TensorType::get());
    c10::List<Future> futures(c10::FutureType::create(tensors));
    for (const auto& work : works_) futures.push_back(work->getFuture());
    const auto collect = [futures](c10::ivalue::Future& all) {
      all.value();  // throws what one of them failed with
      c10::List<at::Tensor> values;
      for (const Future& future : futures) append_tensors(future->value(), &values);
      return c10::IValue(values);
    };
    return c10::collectAll(futures)->then(collect, tensors);
  }

 private:
  const std::vector<Backend::WorkRef> works_;
};

// Shows a call to profilers from now until the work's end; where that cannot be had, its start.
class Shown {
 public:
  Shown(const char* title, at::TensorList tensors) {
    if (!at::hasCallbacks()) return;
    record_ = std::make_shared<at::RecordFunction>(at::RecordScope::USER_SCOPE);
    if (!record_->isActive()) return;
    record_->_setAsync();  // it may end on another thread
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

std::string name_of(int32_t comm) {
  auto info = make<cgx_comm_info_t>();
  check(cgx_comm_info(comm, &info));
  return info.name;
}

}  // namespace

void set_backend_host(const BackendHost& given) { host = given; }

Backend::Backend(int rank, int size, int32_t comm, Inner inner, bool cuda,
                 c10::intrusive_ptr<Options> options, MakeBackend make_backend)
    : c10d::Backend(rank, size),
      comm_(comm),
      name_(name_of(comm)),
      inner_(std::move(inner)),
      cuda_(cuda),
      options_(std::move(options)),
      make_backend_(std::move(make_backend)) {
  init();
}

// Python may hold the last reference, and its lock: threads that the inner backends wait for may
// need that lock to free tensors.
Backend::~Backend() {
  const auto leave = [this] {
    close_communicator();
    inner_.clear();
  };
  host.without_lock ? host.without_lock(leave) : leave();
}

// ---- The group ---------------------------------------------------------------------------------

void Backend::setTimeout(Milliseconds timeout) {
  options_->timeout = timeout;
  for (const auto& [device, backend] : inner_) backend->setTimeout(timeout);
}

Backend::BackendRef Backend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                   const std::vector<int>& ranks, const OptionsRef& options) {
  const auto self = std::find(ranks.begin(), ranks.end(), rank_);
  if (self == ranks.end()) return nullptr;
  return related(store, options, static_cast<int>(self - ranks.begin()),
                 static_cast<int>(ranks.size()));
}

Backend::BackendRef Backend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                   const OptionsRef& options, const int& rank, const int& size) {
  return related(store, options, rank, size);
}

Backend::BackendRef Backend::related(const c10::intrusive_ptr<c10d::Store>& store,
                                     const OptionsRef& options, int rank, int size) {
  // torch asks once for each kind of device, but keeps one backend for all.
  if (related_name_ == options->group_name) {
    if (auto made = related_.lock()) return made;
  }
  const auto ours = c10::dynamic_intrusive_pointer_cast<Options>(options);
  auto copied = c10::make_intrusive<Options>(ours ? *ours : *options_);
  copied->group_name = options->group_name;
  copied->timeout = options->timeout;
  // A hook over this group is none over that one.
  if (copied->unasked == Unasked::kNothing) copied->unasked = Unasked::kGradients;
  BackendRef made = make_backend_(store, rank, size, std::move(copied));
  related_name_ = options->group_name;
  related_ = made;
  return made;
}

void Backend::eagerConnectSingleDevice(at::Device device) {
  const auto found = inner_.find(device.type());
  if (found != inner_.end()) found->second->eagerConnectSingleDevice(device);
}

void Backend::setSequenceNumberForGroup() {
  for (const auto& [device, backend] : inner_) backend->setSequenceNumberForGroup();
}

void Backend::enableCollectivesTiming() {
  for (const auto& [device, backend] : inner_) backend->enableCollectivesTiming();
}

c10d::ErrorType Backend::getError() {
  auto info = make<cgx_comm_info_t>();
  const bool lost = !closed_ && (cgx_comm_info(comm_, &info) != CGX_OK || info.closed ||
                                 cgx_comm_check(comm_, /*finish=*/0) != CGX_OK);
  return lost ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void Backend::abort() {
  close_communicator();
  for (const auto& [device, backend] : inner_) backend->abort();
}

void Backend::shutdown() {
  close_communicator();
  for (const auto& [device, backend] : inner_) backend->shutdown();
}

void Backend::close_communicator() {
  if (!closed_.exchange(true)) cgx_comm_close(comm_);  // fails if cgx_finalize closed it before
}

// ---- allreduce ---------------------------------------------------------------------------------

Backend::WorkRef Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  cgx_op_t op;
  if (tensors.size() == 1 && serves(tensors, options.reduceOp, &op)) {
    return reduce_in_core(tensors, op, options, c10d::OpType::ALLREDUCE);
  }
  return forward_reduction("cgx:all_reduce", tensors, &c10d::Backend::allreduce, tensors, options,
                           tensors);
}

Backend::WorkRef Backend::allreduce_coalesced(Tensors& tensors,
                                              const c10d::AllreduceCoalescedOptions& options) {
  cgx_op_t op;
  if (!tensors.empty() && serves(tensors, options.reduceOp, &op)) {
    return reduce_in_core(tensors, op, options, c10d::OpType::ALLREDUCE_COALESCED);
  }
  return forward_reduction("cgx:all_reduce", tensors, &c10d::Backend::allreduce_coalesced, tensors,
                           options, tensors);
}

bool Backend::serves(at::TensorList tensors, const c10d::ReduceOp& reduce_op, cgx_op_t* op) const {
  const auto known = core_op(reduce_op);
  if (!known) return false;
  *op = *known;
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || (cuda_ && tensor.is_cuda())) &&
           tensor.scalar_type() == tensors[0].scalar_type() && core_dtype(tensor.scalar_type());
  });
}

Backend::WorkRef Backend::reduce_in_core(at::TensorList tensors, cgx_op_t op,
                                         const c10d::AllreduceOptions& options, c10d::OpType type) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  for (const at::Tensor& tensor : tensors) {
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
      C10_THROW_ERROR(ValueError,
                      "allreduce: elements of the tensor share memory (it was expanded); "
                      "give it tensor.contiguous()");
    }
    if (tensor.device() != tensors[0].device()) {
      C10_THROW_ERROR(ValueError, c10::str("allreduce: the list holds tensors on ",
                                           tensors[0].device(), " and ", tensor.device(),
                                           "; one message has one device: call it once for each"));
    }
  }
  Buffers buffers;
  buffers.results = tensors.vec();
  if (tensors.size() == 1 && plain(tensors[0])) {
    buffers.input = tensors[0];
  } else {
    buffers.input = pack(tensors);
    buffers.deliver = [flat = buffers.input, results = buffers.results] { unpack(flat, results); };
  }
  buffers.output = buffers.input;

  const Decision decision = decide_and_tell(op, tensors, buffers.input.numel());
  static const Compression exact;
  const Compression& how = decision.compression ? *decision.compression : exact;
  const std::vector<cgx_segment_t> segments =
      end_to_end(numels_of(tensors), how.bits, how.bucket_size);

  auto collective = cgx::make<cgx_collective_t>();
  collective.comm = comm_;
  collective.verb = CGX_ALLREDUCE;
  collective.dtype = *core_dtype(tensors[0].scalar_type());
  collective.op = op;
  collective.algorithm = how.algorithm;
  collective.rounding = how.rounding;
  collective.gather_bits = how.gather_bits;
  collective.intra_bits = how.intra_bits;
  collective.skip_incomplete_buckets = how.skip_incomplete_buckets ? 1 : 0;
  collective.minimal_size = how.minimal_size;
  if (decision.compression && how.rounding != CGX_NEAREST) {
    collective.seed = nth_seed(named_seed(how.seed, name_), ++draws_);
  }
  collective.output = buffers.output.mutable_data_ptr();  // first: it may move a lazy copy
  collective.input = buffers.input.const_data_ptr();
  collective.segments = segments.data();
  collective.num_segments = static_cast<int64_t>(segments.size());
  // Counted apart from the calls of torch.ops.cgx on this communicator.
  collective.name = "c10d";
  collective.occurrence = -1;
  const Milliseconds allowed = options.timeout > kNoTimeout ? options.timeout : options_->timeout;
  collective.timeout_s = std::chrono::duration<double>(allowed).count();
  ++sequence_;
  return coalesced(start(collective, std::move(buffers), type, options.asyncOp));
}

Decision Backend::decide_and_tell(cgx_op_t op, at::TensorList tensors, int64_t numel) {
  Decision decision = decide(options_->compression, options_->unasked, op, numel);
  const auto call = [&] {
    return c10::str("group '", name_, "': allreduce of ", numel, " ", tensors[0].dtype().name(),
                    tensors.size() == 1 ? "" : c10::str(" in ", tensors.size(), " tensors"));
  };
  if (host.debug_wanted && host.debug_wanted()) {
    const std::string how =
        decision.compression ? c10::str(decision.compression->bits, " bits") : std::string("exact");
    host.debug(c10::str(call(), ": ", how, ", ", decision.reason));
  }
  static std::atomic<bool> warned{false};
  if (decision.surprising && size_ > 1 && host.warn && !warned.exchange(true)) {
    host.warn(c10::str(
        call(), " stays exact though the group has ", options_->compression->bits, " bits (",
        decision.reason,
        "): only gradients are compressed unasked, while autograd completes them and no hook of the "
        "user's sees to them. To compress this call too, make it inside `with cgx_ops.torch.compressed():`; to have it exact and "
        "hear nothing, inside `with cgx_ops.torch.uncompressed():`. Said once per process."));
  }
  return decision;
}

// ---- Coalescing --------------------------------------------------------------------------------

void Backend::startCoalescing() {
  const std::lock_guard<std::mutex> lock(coalescing_mutex_);
  coalescing_.emplace();  // anew: an exception inside a block leaves it open
}

Backend::WorkRef Backend::endCoalescing() {
  const std::lock_guard<std::mutex> lock(coalescing_mutex_);
  if (!coalescing_) C10_THROW_ERROR(ValueError, "endCoalescing: call startCoalescing first");
  auto works = std::move(*coalescing_);
  coalescing_.reset();
  return c10::make_intrusive<JointWork>(std::move(works));
}

Backend::WorkRef Backend::coalesced(WorkRef work) {
  const std::lock_guard<std::mutex> lock(coalescing_mutex_);
  if (coalescing_ && work) coalescing_->push_back(work);
  return work;
}

// ---- What the inner backends do ----------------------------------------------------------------

c10d::Backend& Backend::inner(at::Device device) const {
  const auto found = inner_.find(device.type());
  if (found != inner_.end()) return *found->second;
  C10_THROW_ERROR(
      NotImplementedError,
      c10::str("the backend cgx has nothing that moves tensors of ", device, " here",
               device.is_cuda() ? ": this torch has no NCCL; move the tensor to the CPU" : ""));
}

// Of no tensor at all, gloo says what is wrong.
at::Device device_of(at::TensorList tensors) {
  return tensors.empty() ? at::Device(at::kCPU) : tensors[0].device();
}

template <typename... Parameters, typename... Arguments>
Backend::WorkRef Backend::forward(const char* title, at::TensorList shown,
                                  WorkRef (c10d::Backend::*method)(Parameters...),
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
  OpOptions of_sum = options;
  of_sum.reduceOp = c10d::ReduceOp::SUM;
  WorkRef sum = start_inner(title, shown, method, arguments..., of_sum);
  return coalesced(averaged(std::move(sum), results.vec(), size_));
}

template <typename... Parameters, typename... Arguments>
Backend::WorkRef Backend::start_inner(const char* title, at::TensorList shown,
                                      WorkRef (c10d::Backend::*method)(Parameters...),
                                      Arguments&&... arguments) {
  Shown call(title, shown);
  c10d::Backend& backend = inner(device_of(shown));
  WorkRef work = (backend.*method)(std::forward<Arguments>(arguments)...);
  call.until(work);
  // Not every rank calls p2p operations. NCCL gives no work for what it did at once.
  if (!work || !c10d::isP2POp(work->retrieveOpType())) ++sequence_;
  return work;
}

Backend::WorkRef Backend::allreduce_sparse(Tensors& tensors,
                                           const c10d::AllreduceOptions& options) {
  return forward("cgx:sparse_all_reduce", tensors, &c10d::Backend::allreduce_sparse, tensors,
                 options);
}

Backend::WorkRef Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return forward("cgx:broadcast", tensors, &c10d::Backend::broadcast, tensors, options);
}

Backend::WorkRef Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  // What other ranks are left with is not defined.
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
  // Only the root has inputs; they tell what profilers should show.
  const Tensors shown = inputs.empty() ? outputs : inputs[0];
  return forward("cgx:scatter", shown, &c10d::Backend::scatter, outputs, inputs, options);
}

Backend::WorkRef Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  const Tensors shown = inputs.empty() ? outputs : inputs[0];
  return forward_reduction("cgx:reduce_scatter", shown, &c10d::Backend::reduce_scatter, outputs,
                           options, outputs, inputs);
}

Backend::WorkRef Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
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
  return forward("cgx:all_to_all", input, &c10d::Backend::alltoall_base, output, input,
                 output_sizes, input_sizes, options);
}

Backend::WorkRef Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                   const c10d::AllToAllOptions& options) {
  return forward("cgx:all_to_all", inputs, &c10d::Backend::alltoall, outputs, inputs, options);
}

Backend::WorkRef Backend::send(Tensors& tensors, int to, int tag) {
  return forward("cgx:send", tensors, &c10d::Backend::send, tensors, to, tag);
}

Backend::WorkRef Backend::recv(Tensors& tensors, int from, int tag) {
  return forward("cgx:recv", tensors, &c10d::Backend::recv, tensors, from, tag);
}

Backend::WorkRef Backend::recvAnysource(Tensors& tensors, int tag) {
  return forward("cgx:recvAnySource", tensors, &c10d::Backend::recvAnysource, tensors, tag);
}

Backend::WorkRef Backend::barrier(const c10d::BarrierOptions& options) {
  Shown call("cgx:barrier", {});
  ++sequence_;
  WorkRef work = inner(options.device.value_or(at::Device(at::kCPU))).barrier(options);
  call.until(work);
  return coalesced(std::move(work));
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  ++sequence_;
  inner(at::kCPU).monitoredBarrier(options, wait_all_ranks);
}

}  // namespace cgx::torch_ops
